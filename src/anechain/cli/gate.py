"""`anechain gate`: does the chain say what the original says?"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from anechain.bake.lora import open_merged
from anechain.bundle.manifest import TOKENIZER, Bundle, open_bundle
from anechain.cli.console import Report, err, open_engine, out, print_json, progress
from anechain.errors import RequestError
from anechain.judge.baseline import Baseline
from anechain.judge.gate import MIN_COSINE, Result, run_gate
from anechain.judge.packages import PackageReport, judge_packages
from anechain.judge.prepare import PROFILES, load_baseline
from anechain.run.chain import Chain
from anechain.run.tokenizer import Tokenizer


def gate(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    engine: Annotated[str, typer.Option(help="reference (judged plain and under stress), cpu or coreml")] = "reference",
    profile: Annotated[str, typer.Option(help="m8 or strict")] = "m8",
    baseline: Annotated[Path | None, typer.Option(help="another baseline of the same source")] = None,
    by_package: Annotated[bool, typer.Option("--by-package", help="also judge every package alone")] = False,
    source: Annotated[str, typer.Option(help="for --by-package: the original, if it has moved")] = "",
    lora: Annotated[str, typer.Option(help="for --by-package: its adapter, if that has moved")] = "",
    fast: Annotated[bool, typer.Option(help="cpu: judge its fast mode")] = False,
    compute_units: Annotated[str, typer.Option(help="coreml: cpu-and-ne (the default), all, cpu-and-gpu, cpu")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Compare BUNDLE with the original, position by position. Exit code 0 pass, 1 fail, 2 could not run."""
    if profile not in PROFILES:
        raise RequestError(f"--profile {profile} is not known: use {' or '.join(PROFILES)}.")
    opened = open_bundle(bundle, verify_hashes=True)
    wanted = Baseline.load(baseline) if baseline else load_baseline(opened, "m8" if profile == "m8" else "strict")
    if wanted.profile != profile:
        raise RequestError(
            f"{baseline} is a baseline of profile {wanted.profile}, not {profile}: use --profile {wanted.profile}."
        )
    adapter = lora or (opened.adapter["ref"] if opened.adapter else None)
    original = open_merged(source or opened.source_ref, adapter) if by_package else None
    results = gate_bundle(opened, wanted, engine, fast, compute_units)
    packages = []
    if original is not None:
        chain = Chain(opened, open_engine(engine, fast=fast, compute_units=compute_units), stitched=False)
        with progress("packages") as report:
            packages = judge_packages(chain, original, wanted, report)
    record = merged(results) | ({"packages": [p.to_json() for p in packages]} if by_package else {})
    if as_json:
        print_json(record)
    else:
        show(results, Tokenizer.load(opened.path / TOKENIZER), packages)
    return 0 if all(r.passed for r in results) else 1


def gate_bundle(
    bundle: Bundle, baseline: Baseline, engine: str, fast: bool = False, compute_units: str = ""
) -> list[Result]:
    """One result for each mode that the verdict needs: the reference engine is judged plain and under stress."""
    results = []
    for stress in (False, True) if engine == "reference" else (False,):
        chain = Chain(bundle, open_engine(engine, stress, fast, compute_units))
        with progress(f"gate {baseline.profile} on {chain.engine.name}") as report:
            results.append(run_gate(chain, baseline, _positions(report)))
    return results


def _positions(report: Report) -> Callable[[int, int], None]:
    return lambda done, total: report(done, total, "positions")


def merged(results: list[Result]) -> dict[str, Any]:
    """One object for all modes: the worst of each figure, and every mode's own under `runs`."""
    runs = [r.to_json() for r in results]
    worst = dict(runs[0])
    for run in runs[1:]:
        for key in ("min_cosine", "min_centred_cosine", "top1"):
            worst[key] = min(worst[key], run[key])
        for key in ("mean_kl", "max_kl"):
            worst[key] = max(worst[key], run[key])
        for key in ("near_ties", "misses"):
            worst[key] = worst[key] + run[key]
        worst["reasons"] = worst["reasons"] + [f"{run['engine']}: {reason}" for reason in run["reasons"]]
        worst["canary"] = worst["canary"] and run["canary"]
        worst["accepted"] = worst["accepted"] and run["accepted"]
    worst["verdict"] = "pass" if all(r.passed for r in results) else "fail"
    worst.pop("free_running")
    return worst | {"runs": runs}


def show(results: list[Result], tokenizer: Tokenizer, packages: list[PackageReport]) -> None:
    """The table that a person reads, and the reasons under it."""
    table = Table("engine", "profile", "verdict", "positions", "top-1", "min cosine", "centred", "mean KL", "max KL")
    for result in results:
        f = result.to_json()
        verdict = Text("PASS", "green") if result.passed else Text("FAIL", "red")
        table.add_row(
            result.engine, result.profile, verdict, str(f["positions"]), f"{f['top1']:.1%}", f"{f['min_cosine']:.6f}",
            f"{f['min_centred_cosine']:.6f}", f"{f['mean_kl']:.1e}", f"{f['max_kl']:.1e}",
        )  # fmt: skip
    out.print(table)
    for result in results:
        for reason in result.reasons:
            out.print(f"{result.engine}: {reason}")
        for step in result.near_ties:
            a, b = (_word(tokenizer, token) for token in (step.wanted, step.got))
            out.print(
                f"{result.engine}: near-tie at {step.prompt} position {step.position}: {a} before {b} by "
                f"{step.margin:.4f} logits ({step.margin / step.ulp:.2f} fp16 ulp) in the original"
            )
        if not result.passed and result.profile == "m8" and result.accepted:
            out.print(
                f"{result.engine}: accepted all the same: every token is right but at near-ties of under 4 fp16 ulp, "
                f"and every centred cosine is at least {MIN_COSINE}; judge with --profile strict"
            )
    for package in packages:
        state = f"bad from {package.first_bad}" if package.first_bad else "good"
        out.print(f"{package.file}: min cosine {package.min_cosine:.6f}, max error {package.max_error:.4f}: {state}")
    if not packages and any(not r.passed for r in results):
        err.print("`--by-package` looks for the package")


def _word(tokenizer: Tokenizer, token: int) -> str:
    """A token as a person reads it; a model's vocabulary may hold more ids than its tokenizer knows."""
    try:
        return repr(tokenizer.decode([token], skip_special=False))
    except RequestError:
        return f"token {token}"
