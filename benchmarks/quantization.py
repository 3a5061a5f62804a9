"""The table of docs/quantization.md: what each scheme and method of rounding costs, on the two real models.

    anechain bake MODEL -o build/fp16          (once a model: the baselines that every row is judged by)
    python benchmarks/quantization.py build/fp16 --rows nearest,methods,others -o build/quantization.jsonl

A row is one scheme for the matrices of all blocks (or for the head alone) and some methods. The arithmetic is float32,
by the oracle, on the weights as they would be stored; m8 is the published bar, strict is held out: 20 prompts of 16
steps, the chat template and one text that fills the context. What is measured is kept and not measured again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.source import Source, open_source
from anechain.bundle.footprint import footprint
from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.recipe import Calibration, Recipe, Rule, parse_scheme
from anechain.bundle.spec import head_pieces, matrices_of
from anechain.bundle.stored import Stored, compress
from anechain.judge.calibration import CalibrationSet
from anechain.judge.gate import compare, judged
from anechain.judge.oracle import Oracle
from anechain.judge.prepare import kept_text, load_baseline
from anechain.judge.rounding import RoundedSource, round_model

SEQUENCES, LENGTH = 64, 128  # of the model's own texts
ALL = "scales+gptq+drift+weigh"  # and "level", where a correction has room for it
ROWS = {
    "nearest": [(f"blocks {s}", "") for s in ("fp16", "int8", "int8-block32", "palette8", "palette6", "int4-block32")]
    + [("head int8", ""), ("embed int8", "")],
    "methods": [("blocks int8", m) for m in ("clip", "gptq", "scales+gptq", "gptq+drift", "gptq+weigh", ALL)]
    + [("blocks int8+rank16", m) for m in ("gptq", ALL, f"{ALL}+level")],
    "others": [
        *(("head int8", m) for m in ("gptq", "scales+gptq")),
        ("blocks palette8", "gptq"), ("blocks int8-block32", ALL), ("blocks int4-block32", ALL),
    ],
}  # fmt: skip


def recipe_of(what: str, methods: str) -> Recipe:
    where, scheme = what.split()
    pattern = "layers.*" if where == "blocks" else where
    rules = () if scheme == "fp16" else (Rule(pattern, parse_scheme(scheme)),)
    calibration = Calibration(tuple(methods.split("+")), SEQUENCES, LENGTH) if methods else None
    return Recipe(f"{what} {methods}".strip(), "fp16", rules, calibration=calibration)


def rounded(source: Source, recipe: Recipe, calibrated: CalibrationSet | None) -> dict[str, Stored]:
    spec = source.spec
    if calibrated is not None:
        return round_model(source, spec, recipe, calibrated.tokens)
    tensors: dict[str, Stored] = {}
    pieces, rows = head_pieces(spec)
    table = source.tensor("embed" if spec.tied else "head")
    head = np.split(np.pad(table, ((0, pieces * rows - len(table)), (0, 0))), pieces)
    for name, (outputs, inputs) in matrices_of(spec).items():
        scheme = recipe.scheme_for(name, outputs * inputs)
        if name == "head":
            stored = head if scheme.bits == 16 else [compress(piece, scheme) for piece in head]
            tensors |= {f"head.{i}": piece for i, piece in enumerate(stored)}
        elif scheme.bits < 16:
            tensors[name] = compress(source.tensor(name), scheme, name)
        elif name != "embed":
            tensors[name] = source.tensor(name).astype(np.float16)
    return tensors


def figures(bundle: Bundle, source: Source, tensors: dict[str, Stored]) -> dict[str, object]:
    oracle, found = Oracle(RoundedSource(source, source.spec, tensors)), {}
    for profile in ("m8", "strict"):
        baseline = load_baseline(bundle, profile)
        hidden = oracle.forward([a.ids for a in baseline.answers])
        steps = [
            compare(a.name, int(p), wanted, got)
            for a, rows in zip(baseline.answers, hidden, strict=True)
            for p, wanted, got in zip(a.positions, a.logits, oracle.logits(rows[a.positions]), strict=True)
        ]
        found[profile] = judged(baseline, steps, "float32").to_json() | {"free_running": None}
    return found


def table(kept: list[dict[str, Any]]) -> str:
    """The rows as Markdown, in the order in which they were measured."""
    figures = ("min_cosine", "min_centred_cosine", "mean_kl", "max_kl", "top1")
    lines = [
        "| model | row | MB | profile | min cosine | centred | mean KL | max KL | top-1 | accepted |",
        "|---" * 10 + "|",
    ]
    for row in kept:
        for profile in ("m8", "strict"):
            numbers = " | ".join(
                f"{row[profile][key]:.4g}" if "kl" in key else f"{row[profile][key]:.5f}" for key in figures
            )
            lines.append(
                f"| {Path(row['model']).stem} | {row['row']} | {row['bytes'] / 1e6:.1f} | {profile} | {numbers} | "
                f"{'yes' if row[profile]['accepted'] else 'no'} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", default="nearest,methods,others")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what the file holds and measure nothing")
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    source = open_source(bundle.source_ref)
    kept = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    if options.table:
        print(table(kept))
        return
    done = {(row["model"], row["row"]) for row in kept}
    calibrated = None
    for what, methods in (row for kind in options.rows.split(",") for row in ROWS[kind]):
        recipe = recipe_of(what, methods)
        if (bundle.source_ref, recipe.name) in done:
            continue
        started = time.perf_counter()
        if recipe.calibration is not None and calibrated is None:
            calibrated = kept_text(source, recipe.calibration)
        tensors = rounded(source, recipe, calibrated if recipe.calibration else None)
        row = {"model": bundle.source_ref, "row": recipe.name, "bytes": footprint(source.spec, recipe).bytes}
        row |= figures(bundle, source, tensors) | {"seconds": round(time.perf_counter() - started)}
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{recipe.name}: {row['bytes'] / 1e6:.1f} MB, {row['seconds']} s")
        for profile in ("m8", "strict"):
            shown = ("min_cosine", "min_centred_cosine", "mean_kl", "max_kl", "top1", "accepted", "reasons")
            print(f"  {profile}: {', '.join(f'{key} {row[profile][key]}' for key in shown)}", flush=True)


if __name__ == "__main__":
    main()
