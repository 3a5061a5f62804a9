"""Palettes: a weight as its place in a small table of fp16 values, one for a matrix or for a group of its rows."""

from dataclasses import dataclass

import numpy as np

from anechain.bundle.quant import finite, matrix_shape
from anechain.bundle.recipe import Scheme
from anechain.errors import RecipeError

BITS = (8, 6, 4)  # what Core ML knows and the ANE is published to take (rule Q4); fewer bits ruin models of this size
_ROUNDS = 100  # of Lloyd's iteration; it ends when nothing moves any more


@dataclass(frozen=True)
class Palettized:
    """A matrix as places in tables: row o, column i is `table[o // (O / G), indices[o, i]]`.

    `indices` [O, I] uint8, each below 2^bits; `table` [G, 2^bits] fp16, ascending.
    """

    indices: np.ndarray
    table: np.ndarray
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.indices.shape[0], self.indices.shape[1]


def palettize(weight: np.ndarray, scheme: Scheme, name: str = "a matrix") -> Palettized:
    """Chooses the tables by 1-D k-means (Lloyd 1982) and gives every weight [O, I] its nearest entry.

    The weight is first rounded to fp16, so that the iteration runs over at most 65 536 values and their counts. It
    starts from the density that is best for many entries, the cube root of that of the weights (Panter & Dite 1951).
    Raises RecipeError, with `name`, like `quantize`.
    """
    rows, _ = matrix_shape(weight, name)
    if scheme.kind != "palette" or scheme.bits not in BITS:
        raise RecipeError(f"{name} cannot be palettised as {scheme}: use palette8, palette6, palette4 or with -groupN.")
    group = scheme.block if scheme.granularity == "group" else rows
    if rows % group:
        raise RecipeError(
            f"{name} has {rows} outputs, which groups of {group} do not divide: use a group that divides them."
        )
    indices = np.empty(weight.shape, np.uint8)
    table = np.empty((rows // group, 2**scheme.bits), np.float16)
    for at in range(rows // group):
        part = slice(at * group, (at + 1) * group)
        values, place, counts = np.unique(
            finite(weight[part], name, part.start), return_inverse=True, return_counts=True
        )
        table[at] = _k_means(values.astype(np.float64), counts.astype(np.float64), 2**scheme.bits)
        indices[part] = nearest(values, table[at])[place].reshape(group, -1)
    return Palettized(indices, table, scheme.bits)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Places uint8 of the entries of an ascending `table` nearest to `values`; half way, the lower one."""
    wide = table.astype(np.float32)
    return np.searchsorted((wide[1:] + wide[:-1]) / 2, values).astype(np.uint8)


def depalettize(palettized: Palettized) -> np.ndarray:
    """[O, I] fp16."""
    groups = len(palettized.table)
    parts = np.split(palettized.indices, groups)
    return np.concatenate([table[part] for table, part in zip(palettized.table, parts, strict=True)])


def _k_means(values: np.ndarray, counts: np.ndarray, entries: int) -> np.ndarray:
    """Ascending values [n] f64 and how often each occurs -> the table [entries] fp16 of least square error."""
    if len(values) <= entries:  # nothing is lost; the rest of the table repeats the last value
        return np.pad(values, (0, entries - len(values)), mode="edge").astype(np.float16)
    weight, total, square = (np.cumsum(np.append(0.0, counts * values**n)) for n in range(3))
    width = np.gradient(values)
    density = np.cumsum((counts / width) ** (1 / 3) * width)
    centres = np.interp((np.arange(entries) + 0.5) / entries, density / density[-1], values)
    for _ in range(_ROUNDS):
        edges = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(values)]])
        held, sums = np.diff(weight[edges]), np.diff(total[edges])
        mean = sums / np.maximum(held, 1)
        cost = np.maximum(np.diff(square[edges]) - held * mean**2, 0)
        moved = np.where(held > 0, mean, centres)
        if empty := int((held == 0).sum()):  # an empty cell goes to where it helps most: it halves a costly one
            costly = np.argsort(-cost, kind="stable")[:empty]
            moved[held == 0] = mean[costly] + np.sqrt(cost[costly] / np.maximum(held[costly], 1))
        if np.array_equal(moved, centres):
            break
        centres = np.sort(moved)
    table: np.ndarray = centres.astype(np.float16)
    return table
