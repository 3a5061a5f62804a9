"""`anechain eval`: does the assistant do the right thing?"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from anechain.bake.lora import open_merged
from anechain.bundle.manifest import Bundle, open_bundle, write_atomically
from anechain.cli.console import err, open_engine, out, print_json, progress
from anechain.errors import RequestError
from anechain.judge.answers import Answerer, AnswerFile, ChainAnswerer, OracleAnswerer
from anechain.judge.evaluate import Comparison, Evaluation, Group, compare, evaluate, junit, traces
from anechain.judge.paired import mcnemar, paired_interval
from anechain.judge.prepare import cache_folder
from anechain.judge.suite import Suite, load_suite
from anechain.run.chain import Chain

DEFAULT_SUITE = "mac-actions"


def eval(  # the verb's name
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    suite: Annotated[str, typer.Option(help="a suite's folder, a .jsonl file, or a shipped suite")] = DEFAULT_SUITE,
    against: Annotated[Path | None, typer.Option(metavar="BUNDLE", help="another bundle, on the same fixtures")] = None,
    against_source: Annotated[str, typer.Option(metavar="MODEL", help="or an original, in float32")] = "",
    against_lora: Annotated[str, typer.Option(metavar="DIR", help="with --against-source: its adapter")] = "",
    split: Annotated[str, typer.Option(help="all, gate or trace")] = "all",
    smoke: Annotated[bool, typer.Option("--traces", help="the traces: valid JSON and latency only")] = False,
    engine: Annotated[str, typer.Option(help="cpu, reference or coreml")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: bf16 arithmetic where the machine has it")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="ask again what was answered before")] = False,
    junit_file: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="write JUnit XML")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Ask BUNDLE what a suite's fixtures ask, and judge the answers, alone or paired with another's.

    Exit code 0; with --traces 1 when an answer is not valid.
    """
    if against and against_source:
        raise RequestError("--against and --against-source are two opponents: give one of them.")
    if against_lora and not against_source:
        raise RequestError("--against-lora belongs to --against-source: give the model that it changes.")
    if smoke and (against or against_source):
        raise RequestError("--traces judges one bundle alone: leave --against out.")
    loaded = load_suite(suite)
    loaded.of_split(split)
    opened = open_bundle(bundle, verify_hashes=True)
    if smoke:
        record = smoke_run(opened, loaded, engine, fast)
        print_json(record) if as_json else show_traces(record)
        return 0 if record["valid"] == record["n"] else 1
    candidate = evaluate_bundle(opened, loaded, split, engine, fast, fresh)
    comparison = None
    if against:
        other = evaluate_bundle(open_bundle(against, verify_hashes=True), loaded, split, engine, fast, fresh)
        comparison = compare(candidate, other)
    elif against_source:
        source = open_merged(against_source, against_lora or None)
        answerer = OracleAnswerer(loaded, source, opened.context)
        comparison = compare(candidate, _evaluated(answerer, loaded, split, source.ref, fresh), engines_may_differ=True)
    if junit_file:
        write_atomically(junit_file, junit(candidate).encode())
        err.print(f"{junit_file}: {len(candidate.outcomes)} test cases")
    if as_json:
        print_json(candidate.to_json() | ({"against": comparison.to_json()} if comparison else {}))
    else:
        show(candidate, comparison)
    return 0


def evaluate_bundle(
    bundle: Bundle, suite: Suite, split: str, engine: str = "cpu", fast: bool = False, fresh: bool = False
) -> Evaluation:
    """The evaluation of an opened bundle, with a bar; answers are kept in the cache."""
    answerer = ChainAnswerer(suite, Chain(bundle, open_engine(engine, fast=fast)))
    return _evaluated(answerer, suite, split, bundle.path.name, fresh)


def smoke_run(bundle: Bundle, suite: Suite, engine: str = "cpu", fast: bool = False) -> dict[str, Any]:
    """The traces of the suite (all fixtures where it has none), asked now: their times are part of the answer."""
    split = "trace" if any(f.split == "trace" for f in suite.fixtures) else "all"
    answerer = ChainAnswerer(suite, Chain(bundle, open_engine(engine, fast=fast)), reuse=False)
    with progress(f"traces {bundle.path.name}") as report:
        return traces(evaluate(suite, split, answerer, None, lambda d, t: report(d, t, "requests")))


def _evaluated(answerer: Answerer, suite: Suite, split: str, name: str, fresh: bool) -> Evaluation:
    kept = AnswerFile(cache_folder("answers"), answerer.identity)
    if fresh:
        kept.begin()
    with progress(f"eval {name}") as report:
        return evaluate(suite, split, answerer, kept, lambda d, t: report(d, t, "fixtures"))


def show(candidate: Evaluation, comparison: Comparison | None) -> None:
    """The table that a person reads, then the paired figures, then every discordant fixture."""
    table = Table("fixtures", "passed", "rate", "95% interval (Wilson)", *(["other"] if comparison else []))
    others = [*comparison.other.groups(), comparison.other.total] if comparison else []
    for number, group in enumerate([*candidate.groups(), candidate.total]):
        if group.name == "all":
            table.add_section()
        table.add_row(*_row(group), *([f"{others[number].rate:.1%}"] if comparison else []))
    out.print(table)
    identity = candidate.identity
    out.print(
        f"suite {identity['suite']} {identity['suite_sha256'][:12]}, split {identity['split']}, prompts "
        f"{identity['prompts_sha256'][:12]}, {identity['engine']} on {identity['machine']['processor']}; record "
        f"{candidate.sha256[:12]}"
    )
    if comparison is None:
        for outcome in candidate.outcomes:
            if not outcome.passed:
                out.print(f"{outcome.fixture.name}: {'; '.join(outcome.judgement.faults)}")
        return
    pairs, interval = comparison.pairs, paired_interval(comparison.pairs)
    out.print(
        f"paired: {pairs.lost} lost, {pairs.gained} gained of {pairs.n} (one fixture is {100 / pairs.n:.2f} pp); "
        f"difference {100 * pairs.difference:+.2f} pp, 95% interval {100 * interval.low:+.2f} ... "
        f"{100 * interval.high:+.2f} pp (Tango); exact McNemar p = {mcnemar(pairs):.3g}"
    )
    for mine, theirs in comparison.discordant():
        word = Text("gained", "green") if mine.passed else Text("lost", "red")
        out.print(Text.assemble(word, f" {mine.fixture.name}: {mine.fixture.input}"))
        out.print(f"    this:  {mine.answer.text}\n    other: {theirs.answer.text}")
        for fault in (mine if not mine.passed else theirs).judgement.faults:
            out.print(f"    {fault}")


def _row(group: Group) -> list[str]:
    low, high = group.interval.low, group.interval.high
    return [group.name, f"{group.passed} of {group.n}", f"{group.rate:.1%}", f"{low:.1%} ... {high:.1%}"]


def show_traces(record: dict[str, Any]) -> None:
    out.print(f"{record['valid']} of {record['n']} answers are whole and valid JSON under the schema")
    for key, what in (("first_token_ms", "first token"), ("answer_ms", "whole answer")):
        if times := record[key]:
            out.print(f"{what}: median {times['median']:.0f} ms, 95th percentile {times['p95']:.0f} ms")
    if record["decode_tok_per_s"]:
        out.print(f"decode: {record['decode_tok_per_s']:.1f} tok/s")
    for broken in record["broken"]:
        out.print(f"{broken['name']}: {'; '.join(broken['faults'])}")
