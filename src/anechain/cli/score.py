"""`anechain score`: speed x accuracy x cost, every part shown."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from anechain.bundle.manifest import Bundle, open_bundle
from anechain.cli.console import open_engine, out, print_json, progress
from anechain.cli.eval import DEFAULT_SUITE, evaluate_bundle
from anechain.judge.answers import requests
from anechain.judge.evaluate import Comparison, compare
from anechain.judge.score import Score, ScorePair, compared, measure
from anechain.judge.suite import Suite, load_suite
from anechain.run.chain import Chain


def score(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    against: Annotated[Path, typer.Option(metavar="BUNDLE", help="the bundle to compare with")],
    suite: Annotated[str, typer.Option(help="a suite's folder, a .jsonl file, or a shipped suite")] = DEFAULT_SUITE,
    split: Annotated[str, typer.Option(help="the fixtures of the pass rate: all, gate or trace")] = "all",
    engine: Annotated[str, typer.Option(help="cpu, reference or coreml")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: bf16 arithmetic where the machine has it")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure BUNDLE and another in turns, and compare speed, accuracy and cost."""
    loaded = load_suite(suite)
    loaded.of_split(split)
    bundles = (open_bundle(bundle, verify_hashes=True), open_bundle(against, verify_hashes=True))
    comparison = compare(*(evaluate_bundle(b, loaded, split, engine, fast) for b in bundles))
    pair = score_pair(bundles, comparison, loaded, engine, fast)
    if as_json:
        print_json(pair.to_json())
        return
    show_score(pair, (bundle.name, against.name))


def score_pair(
    bundles: tuple[Bundle, Bundle], comparison: Comparison, suite: Suite, engine: str = "cpu", fast: bool = False
) -> ScorePair:
    """The two bundles, measured in turns on the request of the suite's first fixture, with the pass rates that were
    found."""
    name = comparison.candidate.outcomes[0].fixture.name
    prompts = [requests(suite, b)[name] for b in bundles]
    with progress("score") as report:
        measured = measure(
            [b.path for b in bundles], partial(open_chain, engine=engine, fast=fast), prompts, suite.sha256, report
        )
    rates = (comparison.candidate.rate, comparison.other.rate)
    return compared(*(Score(m, rate) for m, rate in zip(measured, rates, strict=True)))


def open_chain(path: Path, engine: str, fast: bool) -> Chain:
    """What the process that measures holds; it is found there by its name."""
    return Chain(open_bundle(path), open_engine(engine, fast=fast))


def show_score(pair: ScorePair, names: tuple[str, str]) -> None:
    mine, theirs = pair.candidate, pair.other
    a, b = mine.measurement, theirs.measurement
    table = Table("", *names, "ratio or difference")
    table.add_row("first token, ms", _times(a.to_json()["first_token_ms_range"], a.first_token_ms),
                  _times(b.to_json()["first_token_ms_range"], b.first_token_ms),
                  f"{b.first_token_ms / a.first_token_ms:.2f}x")  # fmt: skip
    table.add_row("decode, tok/s", _times(a.to_json()["tok_per_s_range"], a.tok_per_s),
                  _times(b.to_json()["tok_per_s_range"], b.tok_per_s), f"{a.tok_per_s / b.tok_per_s:.2f}x")  # fmt: skip
    table.add_row("speed", f"{mine.speed:.3f}", f"{theirs.speed:.3f}", f"{pair.speed_ratio:.2f}x")
    table.add_row(
        "accuracy", f"{mine.accuracy:.1%}", f"{theirs.accuracy:.1%}", f"{0.0 - pair.accuracy_loss_pp:+.2f} pp"
    )
    table.add_row("disk, GiB", f"{a.disk_bytes / 2**30:.3f}", f"{b.disk_bytes / 2**30:.3f}", "")
    table.add_row("peak memory, GiB", f"{a.peak_rss_bytes / 2**30:.3f}", f"{b.peak_rss_bytes / 2**30:.3f}", "")
    table.add_row("cost (2 / GiB)", f"{mine.cost:.3f}", f"{theirs.cost:.3f}", f"{pair.cost_ratio:.2f}x")
    table.add_section()
    ratio = f"{mine.total / theirs.total:.2f}x" if theirs.total else "-"
    table.add_row("score", f"{mine.total:.3f}", f"{theirs.total:.3f}", ratio)
    out.print(table)
    where = a.conditions
    out.print(
        f"{len(a.runs)} runs each in turns after a warm-up, prompt of {where['prompt_tokens']} tokens and answer of "
        f"{where['tokens']}, {where['engine']} on {where['machine']['processor']}"
    )


def _times(span: list[float], middle: float) -> str:
    return f"{middle:.1f} ({span[0]:.1f} ... {span[1]:.1f})"
