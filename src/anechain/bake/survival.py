"""What rounding leaves of an adapter: two figures for each matrix that it changes. docs/lora.md explains them.

With W the base's matrix, D what the adapter adds to it, Q the rounding to what is stored, and C = Q(W + D) - Q(W):
- `share` is (C . D)^2 / (|C|^2 |D|^2), the part of the change that is the adapter. The rest is rounding that fell
  otherwise. 0 when nothing changed.
- `projection` is (C . D) / |D|^2: how much of the adapter is there on average. About 1 where W lies anywhere between
  the steps, however small D is; 0 where W lies on the steps and D is too small to leave them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from anechain.bake.lora import Merged
from anechain.bundle.recipe import Recipe, Scheme
from anechain.bundle.spec import matrices_of
from anechain.bundle.stored import compress, dense

LOW = 0.5  # below it, rounding moves a matrix more than the adapter does
MAX_ROWS = 512  # of a matrix that are rounded for the figures, evenly spaced; all would take longer than the bake
_DIGITS = 6

Figures = dict[str, dict[str, float]]  # by matrix: share and projection


def survival(merged: Merged, recipe: Recipe, matrices: Iterable[str]) -> Figures:
    """The figures of those of `matrices` that the adapter changes; `head` of a tied model is its one table."""
    figures = {}
    for name in matrices:
        tensor = "embed" if name == "head" and merged.spec.tied else name
        if tensor in merged.changes:
            wide = recipe.compute == "fp32" and name != "embed"  # the host looks up fp16 rows
            outputs, inputs = matrices_of(merged.spec)[name]
            found = compare(merged, tensor, _stored(recipe.scheme_for(name, outputs * inputs), wide, name))
            if found is not None:
                figures[name] = found
    return figures


def compare(merged: Merged, tensor: str, stored: Callable[[np.ndarray], np.ndarray]) -> dict[str, float] | None:
    """The figures of one matrix under `stored`, which rounds rows independently; None when the adapter adds nothing.

    Counted are the rows that the adapter changes; of a vocabulary that was resized, those that both have.
    """
    base, changed = merged.base_tensor(tensor), merged.tensor(tensor)
    common = min(len(base), len(changed))
    rows = np.flatnonzero((base[:common] != changed[:common]).any(axis=1))
    if not len(rows):
        return None
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_ROWS)).round().astype(int)]
    before, after = base[rows], changed[rows]
    d = after.astype(np.float64) - before
    c = stored(after).astype(np.float64) - stored(before)
    both, change, delta = (float((x * y).sum()) for x, y in ((c, d), (c, c), (d, d)))
    share = both**2 / (change * delta) if change else 0.0
    return {"share": round(share, _DIGITS), "projection": round(both / delta, _DIGITS)}


def _stored(scheme: Scheme, wide: bool, name: str) -> Callable[[np.ndarray], np.ndarray]:
    if scheme.bits != 16:
        if scheme.granularity == "group":  # the rows that are looked at fill no groups
            scheme = replace(scheme, granularity="tensor", block=0)
        scheme = replace(scheme, rank=0)  # what a correction brings back is not counted
        return lambda rows: dense(compress(rows, scheme, name))
    return lambda rows: rows if wide else rows.astype(np.float16)


def summary(figures: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """The figures of all matrices in a few; None without one."""
    if not figures:
        return None
    worst = min(figures, key=lambda name: (figures[name]["share"], name))
    result: dict[str, Any] = {"matrices": len(figures), "worst_matrix": worst}
    for kind in ("share", "projection"):
        values = [figure[kind] for figure in figures.values()]
        result |= {f"min_{kind}": min(values), f"mean_{kind}": round(sum(values) / len(values), _DIGITS)}
    return result | {"low": sum(figure["share"] < LOW for figure in figures.values())}


def warning(found: Mapping[str, Any] | None) -> str | None:
    """A sentence about a `summary` in which rounding moves more than the adapter, else None."""
    if not found or not found["low"]:
        return None
    return (
        f"in {found['low']} of {found['matrices']} matrices rounding changes more than the adapter does: the adapter's "
        f"share of the change is {found['mean_share']:.2f} on average and {found['min_share']:.2f} in "
        f"{found['worst_matrix']} (1 would be all of it), and {found['mean_projection']:.2f} of the adapter is there "
        "on average; a finer recipe keeps more"
    )
