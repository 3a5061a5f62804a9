"""`anechain plan`: where Core ML means to run each op of a bundle, and what in it Core ML does not take."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from anechain.bake.lora import open_merged
from anechain.bundle.cache import cache_directory
from anechain.bundle.manifest import open_bundle, write_atomically
from anechain.cli.console import err, out, print_json, progress
from anechain.cli.doctor import mac_model
from anechain.judge.bisect import Culprit, find_culprit
from anechain.judge.plan import Planned, make_plan
from anechain.run.coreml import CoreMLEngine, probe
from anechain.run.coreml_port import COMPUTE_UNITS, AppleCoreML


def plan(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan for `lint --plan`")] = None,
    compute_units: Annotated[str, typer.Option(help=", ".join(COMPUTE_UNITS))] = COMPUTE_UNITS[0],
    bisect: Annotated[bool, typer.Option("--bisect", help="find the package and the layer that fails")] = False,
    source: Annotated[str, typer.Option(help="for --bisect: the original, if it has moved")] = "",
    lora: Annotated[str, typer.Option(help="for --bisect: its adapter, if that has moved")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Ask Core ML where it runs each op of BUNDLE: on a Mac. Exit code 1 when --bisect finds something."""
    engine = CoreMLEngine(compute_units, AppleCoreML)
    opened = open_bundle(bundle)
    if bisect:
        adapter = lora or (opened.adapter["ref"] if opened.adapter else None)
        original = open_merged(source or opened.source_ref, adapter)

        def try_out(packages: Sequence[Path]) -> str | None:
            return probe(packages, compute_units, AppleCoreML, cache_directory() / "coreml")

        culprit = find_culprit(opened, original, try_out, lambda what: err.print(f"bisect: {what}"))
        return show_culprit(culprit, as_json)
    with progress("plan") as report:
        made = make_plan(opened, engine, report)
    document = made.to_json(*mac_model())
    if output is not None:
        write_atomically(output, (json.dumps(document, indent=1) + "\n").encode())
    if as_json:
        print_json(document)
    else:
        show(made)
    return 0


def show(made: Planned) -> None:
    """A line for each function."""
    table = Table("package", "function", "ops on the ANE", "GPU", "CPU", "cost on the ANE")
    for package, function, count, share in made.rows():
        numbers = [str(count.get(device, 0)) for device in ("NE", "GPU", "CPU")]
        table.add_row(package, function, *numbers, "-" if share is None else f"{share:.1%}")
    out.print(table)
    if made.strange:
        err.print(f"{made.strange} ops have names that the packages do not: they are left out")


def show_culprit(culprit: Culprit, as_json: bool) -> int:
    """Exit code 1 when there is one."""
    record = {
        "package": culprit.package or None, "alone": culprit.alone, "layer": culprit.layer,
        "reason": culprit.layer_reason or culprit.reason,
    }  # fmt: skip
    if as_json:
        print_json(record)
    elif not culprit.package:
        out.print("every package compiles, loads and predicts")
    elif not culprit.alone:
        out.print(f"{culprit.package} fails only after the packages before it: {culprit.reason}")
    elif culprit.layer is None:
        out.print(f"{culprit.package} fails, and no layer of it alone does: {culprit.reason}")
    else:
        out.print(f"{culprit.package} fails from layer {culprit.layer} on: {culprit.layer_reason}")
    return 1 if culprit.package else 0
