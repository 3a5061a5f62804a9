"""`anechain ship`: lint, gate, traces, fixtures and score in one run, one verdict, one card."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from anechain.bundle.manifest import TOKENIZER, Bundle, open_bundle, write_atomically
from anechain.cli.console import err, out, plain, print_json, progress
from anechain.cli.doctor import this_machine
from anechain.cli.eval import DEFAULT_SUITE, evaluate_bundle, show, smoke_run
from anechain.cli.gate import gate_bundle
from anechain.cli.gate import show as show_gate
from anechain.cli.score import score_pair, show_score
from anechain.errors import RequestError
from anechain.judge.card import html, model_card, series
from anechain.judge.evaluate import compare
from anechain.judge.lint import lint
from anechain.judge.measured import refuse_diverged
from anechain.judge.prepare import load_baseline
from anechain.judge.record import read_record
from anechain.judge.ship import Evidence, Thresholds, Verdict, append_history, card_data, decide
from anechain.judge.suite import Suite, load_suite
from anechain.run.tokenizer import Tokenizer


def ship(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="the candidate")],
    against: Annotated[Path, typer.Option(metavar="BUNDLE", help="what it would replace")],
    suite: Annotated[str, typer.Option(help="a suite's folder, a .jsonl file, or a shipped suite")] = DEFAULT_SUITE,
    engine: Annotated[str, typer.Option(help="of fixtures and score: cpu or coreml")] = "cpu",
    thresholds: Annotated[Path | None, typer.Option(metavar="FILE", help="a TOML file instead of the built-in")] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="what `doctor --record` wrote on a Mac")] = None,
    override: Annotated[str, typer.Option(metavar="REASON", help="sign off in spite of a failed part")] = "",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="of the card")] = None,
    write_model_card: Annotated[bool, typer.Option("--model-card", help="also write README.md")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Decide whether BUNDLE may replace another. Exit code 0 SHIP, 1 REVERT, 2 could not be judged."""
    limits = Thresholds.load(thresholds)
    loaded = load_suite(suite)
    if override and not override.strip():
        raise RequestError("--override needs a reason: say why a failed part is signed off.")
    candidate, base = (open_bundle(path, verify_hashes=True) for path in (bundle, against))
    made_on_a_mac = read_record(record) if record else None
    if engine == "coreml":
        refuse_diverged(candidate, this_machine())
    evidence = replace(gather(candidate, base, loaded, limits, engine), record=made_on_a_mac)
    verdict = decide(evidence, limits, engine, override)
    card = plain(card_data(evidence, verdict, limits, series(candidate, evidence.gate)))
    folder = output or bundle
    folder.mkdir(parents=True, exist_ok=True)
    write_card(card, folder, write_model_card)
    append_history(candidate, card)
    if as_json:
        print_json(card)
    else:
        report(evidence, verdict, folder)
    return 0 if verdict.ships else 1


def gather(candidate: Bundle, base: Bundle, suite: Suite, limits: Thresholds, engine: str) -> Evidence:
    """Runs every part, each with its bar. What cannot be compared (other prompts, another tokenizer) is refused."""
    with progress("lint") as step:
        found = lint(candidate.path, report=step)
    results = []
    for profile in limits.values["gate"]["profiles"]:
        results += gate_bundle(candidate, load_baseline(candidate, profile), "reference")
    comparison = compare(*(evaluate_bundle(b, suite, "all", engine) for b in (candidate, base)))
    smoke = smoke_run(candidate, suite, engine)
    pair = score_pair((candidate, base), comparison, suite, engine)
    return Evidence(candidate, base, found, results, smoke, comparison, pair)


def write_card(card: dict[str, Any], folder: Path, with_model_card: bool) -> None:
    write_atomically(folder / "card.json", (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomically(folder / "card.html", html(card).encode())
    if with_model_card:
        write_atomically(folder / "README.md", model_card(card).encode())


def report(evidence: Evidence, verdict: Verdict, folder: Path) -> None:
    """What a person reads: every part's own table, then the verdict."""
    show_gate(list(evidence.gate), Tokenizer.load(evidence.bundle.path / TOKENIZER), [])
    if evidence.fixtures is not None:
        show(evidence.fixtures.candidate, evidence.fixtures)
    if evidence.score is not None:
        show_score(evidence.score, (evidence.bundle.path.name, evidence.base.path.name))
    for part in verdict.parts:
        word = Text("pass", "green") if part.passed else Text("FAIL", "red")
        out.print(Text.assemble(word, f" {part.name}: {part.summary}"))
    out.print(Text(verdict.title, "bold green" if verdict.passed else "bold red"))
    for reason in verdict.reasons:
        out.print(f"    {reason}")
    if verdict.override and not verdict.passed:
        out.print(Text(f"    signed off all the same: {verdict.override}", "red"))
    out.print(f"ANE: {verdict.ane.title}")
    for reason in verdict.ane.reasons:
        out.print(f"    {reason}")
    err.print(f"{folder / 'card.html'}, {folder / 'card.json'}")
