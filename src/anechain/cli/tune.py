"""`anechain tune`: the smallest recipe that passes."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bake.lora import open_merged
from anechain.bundle.recipe import Calibration
from anechain.cli.console import err, out, print_json, progress
from anechain.errors import RequestError
from anechain.judge.tune import METHODS, TEXT_LENGTH
from anechain.judge.tune import tune as search
from anechain.judge.tune_report import table, write_report


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a Hugging Face directory or hub id, a .gguf, `demo`")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the recipe to write, a .toml file")],
    ane: Annotated[bool, typer.Option("--ane", help="only forms that `lint` takes without an E finding")] = False,
    linear: Annotated[bool, typer.Option("--linear", help="scales only, no palettes")] = False,
    lora: Annotated[str, typer.Option(metavar="DIR", help="a PEFT LoRA adapter to merge into the model")] = "",
    context: Annotated[int, typer.Option(help="positions of the key/value cache that the exam fills")] = 1024,
    seed: Annotated[int, typer.Option(help="of the model's own words in the calibration text")] = 0,
    sequences: Annotated[
        int, typer.Option(help=f"how many texts of its own, of {TEXT_LENGTH} tokens, the model adds")
    ] = 160,
    jobs: Annotated[int, typer.Option(help="processes at once")] = min(4, os.cpu_count() or 1),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Search for the smallest recipe whose chain passes the gate. Exit code 0 found, 1 none passes, 2 could not run.

    A search that is stopped goes on where it was when it is started again.
    """
    started = time.perf_counter()
    if output.suffix != ".toml":
        raise RequestError(f"-o {output} is not a .toml file: give the recipe's name, such as {output}.toml.")
    if not output.parent.is_dir():
        raise RequestError(f"there is no folder {output.parent}: make it, or give another place with -o.")
    faults = [f"--{name} {value}" for name, value in (("jobs", jobs), ("sequences", sequences)) if value < 1]
    faults += [f"--seed {seed}"] if seed < 0 else []
    if faults:
        raise RequestError(f"{', '.join(faults)} is too small: use a whole number of at least 1 (a seed may be 0).")
    source = open_merged(model, lora or None)
    if source.spec.max_context < context:
        raise RequestError(f"--context {context} is more than the {source.spec.max_context} positions it knows.")
    calibration = Calibration(METHODS, sequences, TEXT_LENGTH, seed)
    with progress("tune") as report:
        tuned = search(source, lora or None, calibration, context, jobs, ane, linear, report)
    flags = [*(["--ane"] if ane else []), *(["--linear"] if linear else []), *(["--lora", lora] if lora else [])]
    command = " ".join([model, *flags, f"--context {context} --seed {seed} --sequences {sequences}"])
    files = write_report(tuned, output, command)
    record: dict[str, Any] = {
        "found": tuned.best is not None,
        "verdict": tuned.verdict,
        "recipe": tuned.best.recipe.to_json() if tuned.best else None,
        "candidates": [{**asdict(c), "recipe": c.recipe.to_json(), "passes": c.passes} for c in tuned.candidates],
        "sensitivity": dict(tuned.sensitivity),
        "files": [str(file) for file in files],
        "wall_s": round(time.perf_counter() - started, 1),
    }
    if as_json:
        print_json(record)
    else:
        out.print(table(tuned))
        out.print(tuned.verdict)
        err.print(f"written: {', '.join(record['files'])} ({record['wall_s']:.0f} s)")
    return 0 if tuned.best else 1
