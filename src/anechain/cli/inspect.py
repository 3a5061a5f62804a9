"""`anechain inspect`: what is in a bundle, measured from its files."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from anechain.bundle.footprint import footprint
from anechain.bundle.manifest import HEAD, Bundle, open_bundle
from anechain.bundle.program import Function, read_program
from anechain.bundle.spec import DECODE
from anechain.cli.bake import left_fp16
from anechain.cli.console import folder, megabytes, out, print_json


def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show packages, layers, ops by type and weight bytes by dtype, read from the files of BUNDLE."""
    opened = open_bundle(bundle, verify_hashes=True)
    packages = [
        _package(path, f"{b.start}-{b.stop - 1}") for b, path in zip(opened.blocks, opened.block_paths, strict=True)
    ]
    packages.append(_package(opened.head_path, "head"))
    record: dict[str, Any] = {
        "bundle": str(bundle),
        "family": opened.spec.family,
        "model": opened.spec.to_json(),
        "source": {"ref": opened.source_ref, "fingerprint": opened.fingerprint},
        "adapter": opened.adapter,
        "recipe": opened.recipe.to_json(),
        "context": opened.context,
        "prefill": opened.prefill,
        "target": opened.target,
        "state_update": opened.state_update,
        "boundary_scales": list(opened.boundary_scales),
        "packages": packages,
        "embedding": _embedding(opened),
        "left_fp16": left_fp16(opened),
        "calibration": opened.calibration,
        "bytes": folder(bundle),
    }
    if as_json:
        print_json(record)
        return
    out.print(f"{bundle}: {opened.spec.family}, {opened.spec.n_layers} layers, context {opened.context}, "
              f"recipe {opened.recipe.name}, from {opened.source_ref}")  # fmt: skip
    scales = ", ".join(f"{scale:g}" for scale in opened.boundary_scales)
    between = f"int8 (scales {scales})" if scales else "fp16"
    out.print(f"for {opened.target}, state update {opened.state_update}, {between} between packages")
    if opened.adapter:
        out.print(f"with the adapter {opened.adapter['ref']}: {opened.adapter['notes'][0]}")
    dtypes = sorted({d for p in packages for d in p["weight_bytes"]})
    table = Table("package", "layers", "functions", "ops", *(f"{d} weights" for d in dtypes), "on disk")
    for package in packages:
        weights = [megabytes(package["weight_bytes"].get(d, 0)) for d in dtypes]
        ops = ", ".join(f"{name} {sum(count.values())}" for name, count in package["ops"].items())
        table.add_row(
            package["file"], package["layers"], " ".join(package["ops"]), ops, *weights, megabytes(package["bytes"])
        )
    out.print(table)
    totals = Counter[str]()
    for package in packages:
        totals.update(package["ops"][DECODE])
    out.print("ops of a decode step: " + ", ".join(f"{name} {count}" for name, count in totals.most_common()))
    out.print(record["embedding"]["note"])
    out.print(footprint(opened.spec, opened.recipe).note)
    if opened.calibration:
        out.print(f"rounded by calibration on {opened.calibration['tokens']} tokens")


def _package(path: Path, layers: str) -> dict[str, Any]:
    functions = read_program(path).functions
    return {
        "file": path.name,
        "layers": layers,
        "ops": {name: dict(Counter(op.type for op in f.ops).most_common()) for name, f in functions.items()},
        "weight_bytes": weight_bytes(list(functions.values())),
        "bytes": folder(path),
    }


def weight_bytes(functions: list[Function]) -> dict[str, int]:
    """Bytes by dtype of the constants that lie in the weight file; what several functions share counts once."""
    seen: dict[int | str, tuple[str, int]] = {}
    for function in functions:
        for name, value in function.consts.items():
            if name in function.packed:  # unpacked for each function apart: its name has to tell that it is the same
                dtype = function.packed[name]
                seen[name] = dtype, -(-value.size * int(dtype.lstrip("uint")) // 8)
            elif value.size >= 10 and value.dtype.kind in "fiu":  # smaller ones lie in the program itself
                seen[value.__array_interface__["data"][0]] = value.dtype.name, value.nbytes
    totals = Counter[str]()
    for dtype, count in seen.values():
        totals[dtype] += count
    return dict(totals)


def _embedding(bundle: Bundle) -> dict[str, Any]:
    if bundle.embedding == HEAD:
        return {"file": HEAD, "bytes": 0, "note": "the embedding is read from the head's weights: stored once"}
    size = sum(r.bytes for name, r in bundle.files.items() if name.startswith("embedding"))
    why = "the head is stored in another form" if bundle.spec.tied else "the model's head is another matrix"
    return {"file": bundle.embedding, "bytes": size, "note": f"the embedding takes {megabytes(size)} of its own: {why}"}
