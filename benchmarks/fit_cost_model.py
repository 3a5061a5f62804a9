"""Fits the constants of the cost model (anechain.judge.cost) to published measurements, and tests them on others.

    python benchmarks/fit_cost_model.py [--write] [--json]

Half of src/anechain/data/ane-measurements.toml is fitted to, the other half is what the errors are of. Which half a
row is in is not chosen: the rows of a kind, in the order of the sha256 of their ids, in turn. The fit minimises the
mean of |log(predicted / measured)|, so that one measurement that is far off does not decide it. `--write` puts the
constants into src/anechain/data/chips.toml; a test fits again and compares.
"""

import argparse
import hashlib
import json
import math
import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anechain.judge.cost import Chip, Constants, Work, chips, parts

DATA = Path(__file__).parents[1] / "src/anechain/data"
KINDS = ("head", "chunk", "decode")
FITTED = ("layer_ms", "compute_share", "expansion")
START = {"layer_ms": 0.2, "compute_share": 0.35, "expansion": 0.1, "A19 Pro": 40.0}
DIGITS = 4

Row = dict[str, Any]


def work_of(row: Row) -> Work:
    body, head = row.get("body_millions", 0) * 1e6, row["head_millions"] * 1e6
    query, layers = row.get("query", 1), row.get("layers", 0)
    attention = 2 * layers * query * row.get("context", 0) * row.get("attention_width", 0)
    computed = body * query + head * row.get("head_rows", 1) + attention
    stored = (body + head) * row["bits"] / 8
    return Work(stored, 2 * (body + head), row.get("state_mb", 0) * 1e6, computed, layers, row.get("dispatches", 1))


def measured_ms(row: Row) -> float:
    return float(row["ms"] if "ms" in row else 1e3 / row["tok_per_s"])


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(fitted to, tested on)"""
    found: tuple[list[Row], list[Row]] = ([], [])
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        for place, row in enumerate(sorted(of_kind, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())):
            found[place % 2].append(row)
    return found


def model(values: dict[str, float], known: dict[str, Chip]) -> tuple[Constants, dict[str, Chip]]:
    fit = Constants(**{name: values[name] for name in FITTED}, decode_spread=1.0, chunk_spread=1.0)
    own = {name: replace(known[name], bandwidth_gb_s=values[name]) for name in values if name in known}
    return fit, known | own


def error(row: Row, fit: Constants, known: dict[str, Chip]) -> float:
    """log(predicted / measured)"""
    return math.log(parts(work_of(row), known[row["chip"]], fit).ms / measured_ms(row))


def fitted(rows: list[Row], known: dict[str, Chip]) -> dict[str, float]:
    """Each constant in turn up and down by a step, as long as that helps; then with half the step."""

    def loss(values: dict[str, float]) -> float:
        fit, table = model(values, known)
        return sum(abs(error(row, fit, table)) for row in rows) / len(rows)

    values, step = dict(START), 0.5
    least = loss(values)
    while step > 1e-5:
        better = False
        for name in values:
            for factor in (1 + step, 1 / (1 + step)):
                tried = values | {name: values[name] * factor}
                if tried["expansion"] <= 1 and (found := loss(tried)) < least - 1e-12:
                    values, least, better = tried, found, True
        step = step if better else step / 2
    return {name: round(value, DIGITS) for name, value in values.items()}


def spread(errors: list[float]) -> float:
    """The factor that 90% of the errors lie within: the next larger of those there are."""
    ordered = sorted(abs(e) for e in errors)
    return round(math.exp(ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = tomllib.loads((DATA / "ane-measurements.toml").read_text(encoding="utf-8"))["measurement"]
    seen, unseen = halves(rows)
    values = fitted(seen, chips())
    fit, known = model(values, chips())
    errors = {row["id"]: error(row, fit, known) for row in rows}
    of_kind = {kind: [errors[row["id"]] for row in unseen if row["kind"] == kind] for kind in KINDS}
    fit = replace(fit, decode_spread=spread(of_kind["decode"]), chunk_spread=spread(of_kind["chunk"]))
    summary = {}
    for half, members in (("fitted to", seen), ("tested on", unseen)):
        for kind in (*KINDS, "all"):
            sizes = [abs(math.expm1(errors[row["id"]])) for row in members if kind in (row["kind"], "all")]
            within = sum(size <= 0.25 for size in sizes)
            mean = sum(sizes) / len(sizes)
            summary[f"{half}, {kind}"] = {"rows": len(sizes), "within_25_percent": within, "mean_error": mean}
    if options.write:
        write(fit, values["A19 Pro"])
    if options.json:
        print(json.dumps({"fit": asdict(fit), "A19 Pro": values["A19 Pro"], "summary": summary, "errors": errors}))
        return
    for half, members in (("fitted to", seen), ("tested on", unseen)):
        print(f"\n{half}\n\n| measurement | measured ms | predicted ms | error |\n|---|---|---|---|")
        for row in sorted(members, key=lambda row: (KINDS.index(row["kind"]), row["id"])):
            predicted = measured_ms(row) * math.exp(errors[row["id"]])
            print(f"| {row['id']} | {measured_ms(row):.1f} | {predicted:.1f} | {math.expm1(errors[row['id']]):+.0%} |")
    print()
    for name, found in summary.items():
        print(f"{name}: {found['within_25_percent']} of {found['rows']} within 25%, mean {found['mean_error']:.0%}")
    print(f"\n{fit}\nA19 Pro: {values['A19 Pro']} GB/s")


def write(fit: Constants, a19_pro: float) -> None:
    path = DATA / "chips.toml"
    text = path.read_text(encoding="utf-8")
    lines = "\n".join(f"{name} = {value}" for name, value in asdict(fit).items())
    text = re.sub(r"(?s)(\[fit\]\n).*?\n\n", lambda found: f"{found[1]}{lines}\n\n", text, count=1)
    text = re.sub(r'(?s)(name = "A19 Pro".*?bandwidth_gb_s = )[^\n]*', lambda found: f"{found[1]}{a19_pro}", text)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
