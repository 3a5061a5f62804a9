"""The page in a headless browser: keys, streaming text, settings, errors; it loads nothing from anywhere else."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.scripted import Running, Scripted, serving, tokenizer
from tests.tiny import CHAT_TEMPLATE, EOS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium"),
    pytest.mark.slow,
]

MARKDOWN = """# A title

Some **bold**, *slanted* and `code` text, with a [link](https://example.com/) and <b>no</b> HTML.

1. first
2. second
   - inner, with a long line that has to be wrapped somewhere because it does not fit into a narrow window
- another

| name | value |
|---|---|
| a | 1 |

```python
def f(x):
    return "<script>alert(1)</script>"
```

> quoted
"""
ANSWERS = {
    "markdown": MARKDOWN,
    "evil": '<img src=x onerror="window.bad = 1"> [x](javascript:alert(1)) <script>window.bad = 1</script>',
    "think": "<think>\nhm, let me see\n</think>\n\nDone.",
    "json": '{"ok": true}',
}


def script(prompt: str, index: int) -> int:
    asked = prompt.rpartition("user\n")[2].partition("<")[0].partition("\n")[0]
    if asked.startswith("long"):
        return ord("la "[index % 3])
    answer = ANSWERS.get(asked.strip(), "You said " + asked).encode()
    return answer[index] if index < len(answer) else EOS


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    def fail(step: int) -> None:
        if any(b"explode" in bytes(i for i in fed if i < 256) for fed in chain.fed[-1:]):
            raise RuntimeError

    chain = Scripted(script, context=2048, prefill=1024, step_s=0.001, fail=fail)
    with serving(chain, tokenizer(CHAT_TEMPLATE + "{# <think> #}")) as running:
        yield running


def wait(page: Any, condition: str, seconds: float = 10.0) -> None:
    """Until the script `condition` is true; asked from outside, as the page's own policy forbids to evaluate text."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(5)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    yield from opened(browser, server, "light", 1200)


def opened(browser: Any, server: Running, scheme: str, width: int) -> Iterator[Any]:
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    faults: list[str] = []
    asked: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"http://127.0.0.1:{server.port}/")
    wait(tab, "document.getElementById('model').textContent === 'tiny'")
    yield tab
    assert faults == []
    assert all(url.startswith((f"http://127.0.0.1:{server.port}/", "data:")) for url in asked), asked
    tab.close()


def ask(page: Any, text: str) -> Any:
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    wait(page, "document.getElementById('send').textContent === 'Send'")
    return page.locator(".turn.assistant").last


def test_a_conversation_by_keyboard(page: Any, server: Running) -> None:
    answer = ask(page, "hello")
    assert answer.locator(".text").inner_text() == "You said hello"
    meta = answer.locator(".meta").inner_text()
    assert "first token " in meta and " ms" in meta and " tok/s" in meta and meta.endswith("15 tokens")
    page.keyboard.press("ArrowUp")
    assert page.locator("#say").input_value() == "hello"
    page.keyboard.press("Shift+Enter")
    assert page.locator("#say").input_value() == "hello\n"
    page.locator("#say").fill("")
    ask(page, "again")
    assert page.locator(".turn").count() == 4
    assert b"hello" in bytes(i for i in server.chain.fed[-15] if i < 256) or any(
        b"hello" in bytes(i for i in fed if i < 256) for fed in server.chain.fed[-40:]
    ), "the conversation goes on"
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".turn").count() == 0 and page.evaluate("document.activeElement.id") == "say"


def test_markdown_is_shown_and_html_is_not_run(page: Any) -> None:
    text = ask(page, "markdown").locator(".text")
    assert text.locator("h1").inner_text() == "A title" and text.locator("strong").inner_text() == "bold"
    assert (
        text.locator("em").inner_text() == "slanted"
        and text.locator("a").get_attribute("href") == "https://example.com/"
    )
    assert text.locator("ol > li").count() == 2 and text.locator("ol > li ul > li").count() == 1
    assert text.locator("td").all_inner_texts() == ["a", "1"] and text.locator("blockquote").inner_text() == "quoted"
    assert "<script>alert(1)</script>" in text.locator("pre code").inner_text() and "<b>no</b>" in text.inner_text()
    evil = ask(page, "evil").locator(".text")
    assert page.evaluate("window.bad") is None and evil.locator("img, script, a").count() == 0


def test_it_stops_at_escape(page: Any, server: Running) -> None:
    page.keyboard.type("long")
    page.keyboard.press("Enter")
    wait(page, "document.querySelector('.turn.assistant .text').textContent.length > 30")
    assert page.locator("#send").inner_text() == "Stop"
    page.keyboard.press("Escape")
    wait(page, "document.getElementById('send').textContent === 'Send'")
    assert "stopped" in page.locator(".turn.assistant .meta").inner_text()
    server.settle()


def test_settings_reach_the_server(page: Any) -> None:
    page.locator("#max_tokens").fill("4")
    page.locator("#say").focus()
    answer = ask(page, "hello")
    assert answer.locator(".text").inner_text() == "You" and "cut at the limit" in answer.locator(".meta").inner_text()
    page.locator("#max_tokens").fill("")
    page.locator("#schema").fill(json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}}))
    page.locator("#say").focus()
    assert json.loads(ask(page, "json").locator(".text").inner_text()) == {"ok": True}
    page.locator("#schema").fill('{"uniqueItems": true}')
    page.locator("#say").focus()
    assert "uniqueItems" in ask(page, "json").locator(".meta.error").inner_text()
    page.locator("#schema").fill("{")
    page.locator("#say").focus()
    ask(page, "json")
    assert page.locator("#schemafault").inner_text().startswith("Not JSON")


def test_thinking_and_errors(page: Any) -> None:
    answer = ask(page, "think")
    assert answer.locator(".text").inner_text() == "Done."
    assert answer.locator("details.thought pre").text_content() == "hm, let me see"
    assert "failed inside the server" in ask(page, "explode").locator(".meta.error").inner_text()
    page.keyboard.press("Control+Shift+O")
    assert ask(page, "hello").locator(".text").inner_text() == "You said hello"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 380), ("dark", 380)])
def test_nothing_is_cut_off(browser: Any, server: Running, scheme: str, width: int, tmp_path: Path) -> None:
    for page in opened(browser, server, scheme, width):
        ask(page, "hello")
        ask(page, "markdown")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
        assert dark is (scheme == "dark")
        folder = Path(os.environ.get("ANECHAIN_SCREENSHOTS") or tmp_path)
        page.screenshot(path=folder / f"page-{scheme}-{width}.png")
        assert page.locator("#side").is_visible() is (width > 800)
        if width < 800:
            page.locator("#settings").click()
            assert page.locator("#side").is_visible()
            page.screenshot(path=folder / f"page-{scheme}-{width}-settings.png")
            page.keyboard.press("Escape")
            assert not page.locator("#side").is_visible()
        page.locator("#theme").click()
        assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)") is not dark
