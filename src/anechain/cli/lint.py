"""`anechain lint`: will the ANE take it?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from anechain.bundle.manifest import write_atomically
from anechain.cli.console import err, megabytes, out, print_json, progress
from anechain.errors import RequestError
from anechain.judge.compatibility import parse_machine
from anechain.judge.lint import Finding, Report, Share, total
from anechain.judge.lint import lint as judge
from anechain.judge.lint_report import NOTE, by_rule, fraction, to_json, to_sarif
from anechain.judge.measured import stored_records

SHOWN = 4  # places of a rule before the rest is only counted
STDOUT = "-"
_COLOURS = {"E": "red", "W": "yellow", "I": "cyan"}


def lint(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="a bundle, a .mlpackage, or a folder of them")],
    os: Annotated[str, typer.Option("--os", help="the system it is to run on: macOS26.0.1, iOS18, ...")] = "",
    chip: Annotated[str, typer.Option(help="the chip it is to run on: M4, A17 Pro, ...")] = "",
    plan: Annotated[Path | None, typer.Option(help="a compute plan that was recorded on a Mac")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="a rule that is not to count; may be repeated")] = None,
    every: Annotated[bool, typer.Option("--all", help="list every place, not the first of each rule")] = False,
    sarif: Annotated[str, typer.Option(metavar="FILE", help="write SARIF 2.1.0 to a file, or to stdout (-)")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Hold PATH against the ANE's published rules. Exit code 0 clean, 1 findings of severity E, 2 could not run."""
    if as_json and sarif == STDOUT:
        raise RequestError("--json and --sarif - both want stdout: name a file for one of them.")
    machine = parse_machine(os, chip)
    with progress("lint") as step:
        report = judge(path, machine, plan, ignore or [], step, stored_records() if machine.known else ())
    if sarif and sarif != STDOUT:
        write_atomically(Path(sarif), (json.dumps(to_sarif(report), indent=1) + "\n").encode())
        err.print(f"{sarif}: {len(report.findings)} results")
    if sarif == STDOUT:
        print_json(to_sarif(report))
    elif as_json:
        print_json(to_json(report))
    else:
        show(report, every)
    return 0 if report.clean else 1


def show(report: Report, every: bool) -> None:
    """Findings by rule, then a line for each package."""
    out.print(NOTE)
    for group in by_rule(report.findings):
        _show_rule(group, every)
    for finding in report.overruled:
        where = "/".join(p for p in (finding.package, finding.function, finding.op) if p)
        why = "the plan shows it on the ANE" if finding.basis == "published" else finding.basis
        out.print(f"overruled: {finding.rule} at {where}: {why}")
    for rule, count in report.ignored.items():
        out.print(f"ignored: {rule}, {count} finding{'s' * (count != 1)}")
    if report.machine.known:
        _show_compatibility(report)
    _show_shares(report)
    for name, why in report.skipped.items():
        out.print(f"{name}: skipped, {why}")


def _show_rule(group: list[Finding], every: bool) -> None:
    first = group[0]
    scope = f" [{first.scope}]" if first.scope else ""
    title = Text.assemble(
        (f"{first.severity} {first.rule}", f"bold {_COLOURS[first.severity]}"),
        f"  {first.basis}, confidence {first.confidence}{scope}: {first.what}",
    )
    out.print()
    out.print(title)
    out.print(f"    fix: {first.fix}\n    source: {first.source}")
    for finding in group if every else group[:SHOWN]:
        place = "  ".join(part for part in (finding.package, finding.function, finding.op) if part)
        kind = f"  {finding.dtype} {list(finding.shape)}" if finding.shape is not None else ""
        out.print(f"    {place}{kind}: {finding.detail}")
    if not every and len(group) > SHOWN:
        out.print(f"    and {len(group) - SHOWN} more (--all lists them)")


def _show_compatibility(report: Report) -> None:
    out.print(f"\nWhat is published of {report.machine}:")
    table = Table("feature", "status", "reported for", "what", "source")
    for row, answer, _ in report.compatibility:
        status = row.status if answer == "yes" else f"unknown ({row.status} there)"
        table.add_row(row.feature, status, str(row.scope), row.what, row.source)
    for feature in report.unknown_features:
        table.add_row(feature, "unknown", "", "no report", "")
    out.print(table)


def _show_shares(report: Report) -> None:
    columns = ["package", "functions", "ops", "E", "W", "I", "compute without E", "weights without E"]
    if report.plan is not None:
        columns.append(f"cost on the ANE, measured on {report.plan.where}")
    table = Table(*columns)
    for share in report.shares:
        table.add_row(*_row(share, report.plan is not None))
    if len(report.shares) > 1:
        table.add_section()
        table.add_row(*_row(total(report.shares), report.plan is not None))
    out.print()
    out.print(table)


def _row(share: Share, planned: bool) -> list[str]:
    compute = fraction(share.clear_multiply_adds, share.multiply_adds)
    weights = fraction(share.clear_weight_bytes, share.weight_bytes)
    cells = [
        share.package, " ".join(share.functions), str(share.ops), *(str(share.findings[s]) for s in "EWI"),
        f"{_percent(compute)} of {share.multiply_adds / 1e6:.1f} M",
        f"{_percent(weights)} of {megabytes(share.weight_bytes)}",
    ]  # fmt: skip
    return [*cells, _percent(share.engine_cost)] if planned else cells


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
