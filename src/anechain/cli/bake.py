"""`anechain bake`: a checkpoint becomes a bundle."""

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bake.jobs import PREFILL, make_plan
from anechain.bake.lora import Merged, open_merged
from anechain.bake.place import check_place
from anechain.bake.survival import warning
from anechain.bundle.footprint import footprint
from anechain.bundle.form import TARGETS
from anechain.bundle.manifest import Bundle
from anechain.bundle.mil_format import model_class
from anechain.bundle.recipe import load_recipe
from anechain.cli.console import err, folder, megabytes, print_json, progress
from anechain.errors import RequestError
from anechain.judge.lint_rules import RULES
from anechain.judge.prepare import PROFILES, bake_with_baselines, baseline_file
from anechain.run.tokenizer import Tokenizer

ALL_LAYERS = 10**6  # more than any model has


def bake(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a Hugging Face directory or hub id, a .gguf, `demo`")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the bundle's folder")],
    recipe: Annotated[str, typer.Option(help="a recipe by name, or a .toml file")] = "fp16",
    lora: Annotated[str, typer.Option(metavar="DIR", help="a PEFT LoRA adapter to merge into the model")] = "",
    context: Annotated[int, typer.Option(help="positions of the key/value cache")] = 1024,
    prefill: Annotated[int, typer.Option(help="tokens of a prefill chunk, 0 for none")] = PREFILL,
    layers_per_package: Annotated[str, typer.Option(help="a number, `all`, or `auto`")] = "auto",
    target: Annotated[str, typer.Option(help=f"the oldest system that runs it: {', '.join(TARGETS)}")] = "macOS15",
    state_update: Annotated[str, typer.Option(help="how keys and values are written: slice or blend")] = "slice",
    activations: Annotated[str, typer.Option(help="what packages hand on: fp16, or int8 (macOS26)")] = "fp16",
    jobs: Annotated[int, typer.Option(help="processes at once")] = os.cpu_count() or 1,
    force: Annotated[bool, typer.Option(help="replace another bundle")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Bake MODEL into a chain of Core ML packages, with the baselines that the gate compares with."""
    started = time.perf_counter()
    if layers_per_package not in ("auto", "all") and not re.fullmatch("[0-9]+", layers_per_package):
        raise RequestError(f"--layers-per-package {layers_per_package} is neither a whole number nor `auto` or `all`.")
    words = {"auto": None, "all": ALL_LAYERS}
    per_package = words[layers_per_package] if layers_per_package in words else int(layers_per_package)
    if jobs < 1:
        raise RequestError(f"--jobs {jobs} is not a whole number of at least 1.")
    bundle = bake_bundle(
        model,
        output,
        recipe,
        context,
        prefill,
        per_package,
        target,
        jobs,
        force,
        lora or None,
        state_update,
        activations,
    )
    if bundle.adapter is not None and (lost := warning(bundle.adapter.get("survival"))):
        err.print(f"warning: {lost}")
    record: dict[str, Any] = {
        "bundle": str(output),
        "packages": len(bundle.blocks) + 1,
        "bytes": folder(output),
        "baselines": [p for p in PROFILES if baseline_file(p) in bundle.files],
        "target": bundle.target,
        "state_update": bundle.state_update,
        "boundary_scales": list(bundle.boundary_scales),
        "stream_peak": bundle.stream_peak,
        "stream_scale": bundle.spec.stream_scale,
        "adapter": None if bundle.adapter is None else dict(bundle.adapter),
        "calibration": None if bundle.calibration is None else dict(bundle.calibration),
        "left_fp16": left_fp16(bundle),
        "wall_s": round(time.perf_counter() - started, 2),
    }
    if as_json:
        print_json(record)
        return
    err.print(f"{output}: {record['packages']} packages, {megabytes(folder(output))}, {record['wall_s']:.1f} s")
    err.print(footprint(bundle.spec, bundle.recipe).note)
    if bundle.spec.stream_scale != 1:
        err.print(
            f"the residual stream reaches {bundle.stream_peak:.0f}, too near to the 65504 that fp16 holds: it is "
            f"scaled by {bundle.spec.stream_scale}"
        )
    for profile in (p for p in PROFILES if p not in record["baselines"]):
        err.print(f"no {profile} baseline: its prompts do not fit into a context of {context}")


def left_fp16(bundle: Bundle) -> dict[str, Any]:
    """What the recipe leaves in fp16, and its share of the matrices' bytes."""
    size = footprint(bundle.spec, bundle.recipe)
    return {
        "matrices": list(size.left),
        "bytes": size.left_bytes,
        "share": size.left_bytes / size.bytes,
        "of_fp16": size.share,
        "block_weights_at_8_bits": size.eight_bit_share,
    }


def bake_bundle(
    model: str,
    output: Path,
    recipe: str = "fp16",
    context: int = 1024,
    prefill: int = PREFILL,
    per_package: int | None = None,
    target: str = "macOS15",
    jobs: int = os.cpu_count() or 1,
    force: bool = False,
    lora: str | None = None,
    state_update: str = "slice",
    activations: str = "fp16",
) -> Bundle:
    """Validates everything, then bakes with progress bars; what `bake` and `demo` both do."""
    model_class()  # without the format's definitions nothing could be written at the end
    check_place(output, model, lora)
    source = open_merged(model, lora)
    for part in (source.base, source) if isinstance(source, Merged) else (source,):
        for note in getattr(part, "notes", ()):
            err.print(f"note: {note}")
        for text in getattr(part, "warnings", ()):
            err.print(f"warning: {text}")
    tokenizer = Path(lora) if lora is not None and (Path(lora) / "tokenizer.json").is_file() else Path(model)
    if tokenizer.is_dir():
        Tokenizer.load(tokenizer)  # a file that nothing can tokenize with is found now, not after the packages
    plan = make_plan(source, load_recipe(recipe), context, prefill, target, per_package, state_update, activations)
    if TARGETS[plan.target] > TARGETS["macOS15"]:
        rule = next(rule for rule in RULES if rule.id == "V1")
        err.print(f"warning: --target {target}: rule {rule.id}: {rule.what}; {rule.fix} (published: {rule.source})")
    with progress(f"bake {plan.recipe.name}") as packages:
        return bake_with_baselines(
            source,
            plan,
            output,
            jobs,
            force,
            packages,
            lambda d, t, p: packages(d, t, f"{p} baseline" if p in PROFILES else p),
        )
