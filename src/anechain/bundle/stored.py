"""Every form in which a matrix can be stored, behind one door: compress, widen again, and what it takes on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anechain.bundle.palette import Palettized, depalettize, palettize
from anechain.bundle.quant import Quantized, dequantize, quantize
from anechain.bundle.recipe import Scheme


@dataclass(frozen=True)
class Corrected:
    """A rounded matrix and what is added to it: `base` + `up` [O, r] @ `down` [r, I], both fp16."""

    base: Quantized | Palettized
    up: np.ndarray
    down: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape


Compressed = Quantized | Palettized | Corrected
Single = np.ndarray | Quantized | Palettized  # one constant, or one with the op that spells it out
Stored = np.ndarray | Compressed


def compress(weight: np.ndarray, scheme: Scheme, name: str = "a matrix") -> Compressed:
    """`weight` [O, I] in the form of `scheme`, rounded to nearest; raises RecipeError, with `name`.

    A correction is the best one for inputs that are all alike: the largest singular vectors of the rounding error.
    """
    if scheme.rank:
        base = compress(weight, replace(scheme, rank=0), name)
        assert not isinstance(base, Corrected)
        error = weight.astype(np.float32) - dense(base)  # [O, I]
        _, vectors = np.linalg.eigh(error.T @ error)  # ascending
        return corrected(base, error @ vectors[:, -scheme.rank :], vectors[:, -scheme.rank :].T)
    return palettize(weight, scheme, name) if scheme.kind == "palette" else quantize(weight, scheme, name)


def corrected(base: Quantized | Palettized, up: np.ndarray, down: np.ndarray) -> Corrected:
    """`base` + `up` [O, r] @ `down` [r, I] as fp16, each pair of vectors scaled to the same largest magnitude."""
    largest = np.maximum(np.abs(up).max(axis=0), 1e-12), np.maximum(np.abs(down).max(axis=1), 1e-12)
    share = np.sqrt(largest[1] / largest[0])  # [r]
    return Corrected(base, (up * share).astype(np.float16), (down / share[:, None]).astype(np.float16))


def dense(stored: Stored) -> np.ndarray:
    """What `stored` stands for, [O, I]: fp16, but float32 with a correction (a program adds two results, and neither
    their sum nor this one is rounded to fp16); a plain array is returned as it is.
    """
    if isinstance(stored, Corrected):
        wide: np.ndarray = dense(stored.base) + stored.up.astype(np.float32) @ stored.down.astype(np.float32)
        return wide
    if isinstance(stored, Quantized):
        return dequantize(stored)
    return depalettize(stored) if isinstance(stored, Palettized) else stored


def joined_rows(pieces: Sequence[Stored]) -> Stored:
    """Consecutive rows of a plain or linearly rounded matrix as one matrix."""
    if len(pieces) == 1:
        return pieces[0]
    if rounded := [piece for piece in pieces if isinstance(piece, Quantized)]:
        data, scale = (np.concatenate([getattr(piece, part) for piece in rounded]) for part in ("data", "scale"))
        return Quantized(data, scale, rounded[0].bits)
    return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])


def scheme_of(stored: Stored) -> Scheme:
    """The scheme of a stored tensor, without what its scales and tables are shared by."""
    if isinstance(stored, np.ndarray):
        return Scheme(16)
    base = stored.base if isinstance(stored, Corrected) else stored
    rank = len(stored.down) if isinstance(stored, Corrected) else 0
    return Scheme(base.bits, kind="palette" if isinstance(base, Palettized) else "linear", rank=rank)


def expanded(weights: Mapping[str, Stored]) -> dict[str, Single]:
    """`weights`, with the two matrices of a correction under names of their own beside what they correct."""
    single: dict[str, Single] = {}
    for name, weight in weights.items():
        if isinstance(weight, Corrected):
            single |= {name: weight.base, f"{name}.correction_in": weight.down, f"{name}.correction": weight.up}
        else:
            single[name] = weight
    return single


def storage_bytes(shape: tuple[int, int], scheme: Scheme) -> int:
    """Bytes that a matrix [O, I], its scales, tables and correction take in a program that computes in fp16.

    The scheme fits the matrix: `Recipe.check` has seen to that.
    """
    rows, columns = shape
    if scheme.bits == 16:
        return 2 * rows * columns
    size = -(-rows * columns * scheme.bits // 8) + 2 * scheme.rank * (rows + columns)
    if scheme.kind == "palette":
        return size + int(2 ** (scheme.bits + 1)) * (rows // scheme.block if scheme.granularity == "group" else 1)
    return size + 2 * rows * (columns // scheme.block if scheme.granularity == "block" else 1)
