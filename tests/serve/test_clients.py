"""Programs that were not written here talk to the server: the official client library, and an evaluation harness."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from anechain.bundle.manifest import TOKENIZER
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from anechain.run.sample import log_probabilities
from anechain.run.tokenizer import Tokenizer
from tests.bundle_maker import make_bundle, tiny_source
from tests.serve.scripted import Running, Scripted, says, serving, tokenizer
from tests.serve.test_constrained import PARAMETERS, TOOL, TOOLS_TEMPLATE, prose
from tests.tiny import EOS
from tests.tolerances import SERVED_LOGPROB

ASK: Any = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Scripted(says("Hello wörld 🌊")), tokenizer(TOOLS_TEMPLATE), api_key="k") as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "Hello wörld 🌊" and answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"


def test_streaming(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}, n=2
    )
    chunks = list(stream)
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert own[0].delta.role == "assistant" and own[-1].finish_reason == "stop"
        assert "".join(c.delta.content or "" for c in own) == "Hello wörld 🌊"
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 2 * 18
    with client.chat.completions.stream(model="tiny", messages=ASK) as events:
        assert events.get_final_completion().choices[0].message.content == "Hello wörld 🌊"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASK, logprobs=True, top_logprobs=3, stop="rld")
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and bytes(b for c in content for b in c.bytes or []).decode() == "Hello wö"
    assert all(len(c.top_logprobs) == 3 and c.top_logprobs[0].logprob >= c.top_logprobs[1].logprob for c in content)
    assert content[0].token == content[0].top_logprobs[0].token == "H" and -0.01 < content[0].logprob <= 0


class Action(BaseModel):
    action: Literal["open", "close"]
    count: int


def test_a_schema_becomes_a_model() -> None:
    with serving(Scripted(prose(EOS))) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        answer = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Action, temperature=0)
        assert isinstance(answer.choices[0].message.parsed, Action)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with serving(Scripted(says(call), context=2048), tokenizer(TOOLS_TEMPLATE)) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        tools: Any = [TOOL]
        if stream:
            with client.chat.completions.stream(model="tiny", messages=ASK, tools=tools) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(model="tiny", messages=ASK, tools=tools)  # type: ignore[assignment]
        (made,) = answer.choices[0].message.tool_calls or ()
        assert made.function.name == "weather" and json.loads(made.function.arguments) == {"city": "Oslo"}
        assert answer.choices[0].finish_reason == "tool_calls"
        result: Any = [
            *ASK,
            answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"}),
            {"role": "tool", "tool_call_id": made.id, "content": "7 degrees"},
        ]
        assert client.chat.completions.create(model="tiny", messages=result, tools=tools).choices
    assert PARAMETERS["required"] == ["city"]


def test_errors(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}], stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="tiny", messages=ASK, frequency_penalty=1)
    assert unknown.value.param == "frequency_penalty"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="other", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


def test_an_error_inside_a_stream() -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise RuntimeError

    with serving(Scripted(says("hello"), fail=fail)) as running:
        client = openai.OpenAI(base_url=running.url, api_key="none", max_retries=0)
        heard = []
        with pytest.raises(openai.APIError, match="failed inside the server"):
            for chunk in client.chat.completions.create(model="tiny", messages=ASK, stream=True):
                heard.append(chunk.choices[0].delta.content or "")
        assert "".join(heard) == "hel"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a assistant\n", "b assistant\n"], max_tokens=5, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3] and {c.text for c in answer.choices} == {"Hello"}
    stream = client.completions.create(model="tiny", prompt="a assistant\n", max_tokens=5, stream=True, echo=True)
    assert "".join(c.choices[0].text for c in stream) == "a assistant\nHello"
    raw = client.completions.create(model="tiny", prompt=list(b"a assistant\n"), max_tokens=0, echo=True, logprobs=2)
    assert raw.choices[0].text == "a assistant\n" and raw.choices[0].finish_reason == "length"
    assert raw.choices[0].logprobs and len(raw.choices[0].logprobs.token_logprobs or []) == 12


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    out = tmp_path_factory.mktemp("bundles") / "b"
    chain = Chain(make_bundle(tiny_source("qwen3"), out, "fp16", 64, 32), ReferenceEngine())
    with serving(chain, Tokenizer.load(chain.bundle.path / TOKENIZER)) as running:
        yield running


def test_log_probabilities_are_the_chains_own(real: Running) -> None:
    ids = list(b"What is it, and why not?")
    reply = real.complete(ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    got = reply.json["choices"][0]["logprobs"]
    session, wanted, greedy = real.chain.start(), [], []
    for token_id, following in zip(ids, [*ids[1:], None], strict=True):
        values = log_probabilities(real.chain.feed(session, [token_id]), 260)
        greedy.append(float(values.max()))
        wanted.append(float(values.max() if following is None else values[following]))
    assert got["token_logprobs"][0] is None and len(got["token_logprobs"]) == len(ids) + 1
    assert np.allclose(got["token_logprobs"][1:], wanted, atol=SERVED_LOGPROB, rtol=0)
    assert np.allclose([max(t.values()) for t in got["top_logprobs"][1:]], greedy, atol=SERVED_LOGPROB, rtol=0)
    assert {len(top) for top in got["top_logprobs"][1:]} == {1, 2}, "the likeliest, and the one that was taken"
    for token, value, top in list(zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True))[1:]:
        assert top[token] == value
    assert not math.isclose(min(wanted), max(wanted), abs_tol=1.0), "or nothing was compared"


TASK = """
task: tiny_words
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_the_evaluation_harness(real: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "tenacity", "aiohttp"):  # the last two for models behind a server
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e .[lm-eval]")
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"q": f"Is {i} it? "}) + "\n" for i in range(4)))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("FILE", str(tmp_path / "test.jsonl")))
    model = LocalCompletionsAPI(
        base_url=f"{real.url}/completions", model="tiny", tokenizer=str(real.chain.bundle.path / TOKENIZER),
        tokenizer_backend="huggingface", num_concurrent=1, max_length=63,
    )  # fmt: skip
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(model=model, tasks=["tiny_words"], task_manager=manager, bootstrap_iters=0)
    scores = []
    for sample in results["samples"]["tiny_words"]:
        for i, choice in enumerate(("yes", "no")):
            prompt = sample["doc"]["q"].rstrip()  # the harness counts the last space to what follows
            ids, start = list(f"{sample['doc']['q']} {choice}".encode()), len(prompt.encode())
            session, total = real.chain.start(), 0.0
            for position, token_id in enumerate(ids[:-1]):
                values = log_probabilities(real.chain.feed(session, [token_id]), 260)
                total += float(values[ids[position + 1]]) if position + 1 >= start else 0.0
            scores.append((sample["filtered_resps"][i][0], total))
    assert len(scores) == 8
    assert np.allclose([float(a) for a, _ in scores], [b for _, b in scores], atol=4 * SERVED_LOGPROB, rtol=0)
