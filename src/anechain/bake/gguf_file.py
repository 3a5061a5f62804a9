"""One GGUF file: metadata and tensor table parsed at once, tensors dequantised one at a time from the mapped file.

The header is parsed here because `gguf.GGUFReader` makes an array of every string of the vocabulary: 2 s for 49 000
tokens, where this takes a few hundredths. Layout: the GGUF specification of ggml, versions 2 and 3, little endian.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from anechain.errors import SourceError

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_ALIGNMENT = 32  # of the data, where `general.alignment` does not say otherwise


@dataclass(frozen=True)
class GgufTensor:
    """A row of the tensor table. `shape` is rows first, the reverse of the file's order; `begin` counts from the file's
    start, in bytes; `row_bytes` is what the last axis takes."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """`metadata` (key -> int, float, bool, str or list of them) and `tensors` (name -> GgufTensor).

    Raises SourceError when the file is not a whole GGUF file, or holds tensors of a type that cannot be dequantised:
    the sentence has the name of each such type and the first tensor of it, and nothing has been dequantised before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise SourceError(f"{path} is empty: copy or download it again.")
            self._bytes: np.ndarray = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise SourceError(f"{path} cannot be read ({error.strerror}): check it and its permissions.") from None
        cursor = _Cursor(self._bytes)
        if cursor.data[:23] == b"version https://git-lfs":
            raise SourceError(f"{path} is a Git LFS pointer: fetch the real file with `git lfs pull`.")
        if cursor.data[:4] != b"GGUF":
            raise SourceError(f"{path} is not a GGUF file: give a .gguf model or a Hugging Face directory.")
        try:
            _, version, n_tensors, n_values = cursor.take("4sIQQ")
            if version not in (2, 3):
                raise SourceError(f"{path} has GGUF version {version}: only 2 and 3, little endian, are supported.")
            self.metadata = dict(cursor.pair() for _ in range(n_values))
            table = [cursor.tensor() for _ in range(n_tensors)]
        except (struct.error, ValueError, OverflowError):
            raise SourceError(f"{path} is cut off or damaged within its header: copy or download it again.") from None
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise SourceError(f"{path} has general.alignment = {alignment!r}: copy or download it again.")
        self.tensors = _placed(path, table, -(-cursor.position // alignment) * alignment)
        short = [name for name, tensor in self.tensors.items() if tensor.end > self._bytes.size]
        if short:
            raise SourceError(
                f"{path} ends after {self._bytes.size} bytes, within the data of {short[0]}: copy or download it again."
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised to float32; a read-only view of the file when it is stored so."""
        tensor = self.tensors[name]
        raw = self._bytes[tensor.begin : tensor.end].reshape(*tensor.shape[:-1], tensor.row_bytes)
        return np.asarray(dequantize(raw.view(np.ndarray), tensor.kind))


class _Cursor:
    """Reads the header from front to back. A read past the end is a struct.error, at the latest by the next number."""

    def __init__(self, content: np.ndarray) -> None:
        self.data = memoryview(content)
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        begin = self.position
        self.position += length
        return str(self.data[begin : self.position], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            inner, length = self.take("IQ")
            if inner in _SCALARS:
                return list(self.take(f"{length}{_SCALARS[GGUFValueType(inner)]}"))
            return [self.value(inner) for _ in range(length)]
        return self.take(_SCALARS[GGUFValueType(kind)])[0]

    def pair(self) -> tuple[str, Any]:
        key = self.text()
        (kind,) = self.take("I")
        return key, self.value(kind)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        (n_axes,) = self.take("I")
        shape = tuple(reversed(self.take(f"{n_axes}Q")))
        kind, offset = self.take("IQ")
        return name, shape, kind, offset


def _placed(path: Path, table: list[tuple[str, tuple[int, ...], int, int]], data: int) -> dict[str, GgufTensor]:
    """The tensor table with types resolved and offsets counted from the file's start."""
    first_of: dict[int, str] = {}
    for name, _, kind, _ in table:
        first_of.setdefault(kind, name)
    refused = {kind: name for kind, name in first_of.items() if not _dequantises(kind)}
    if refused:
        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        stated = ", ".join(f"{known.get(kind, f'number {kind}')} (first in {name})" for kind, name in refused.items())
        raise SourceError(f"{path} has tensors of a type that is not supported: {stated}; use another quantisation.")
    tensors = {}
    for name, shape, kind, offset in table:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if name in tensors or not shape or 0 in shape or shape[-1] % block:
            raise SourceError(f"{path} has a damaged entry for tensor {name}: copy or download it again.")
        row_bytes = shape[-1] // block * block_bytes
        tensors[name] = GgufTensor(GGMLQuantizationType(kind), shape, data + offset, row_bytes)
    return tensors


def _dequantises(kind: int) -> bool:
    """Whether gguf can dequantise this type, tried on one block of zeros."""
    if kind not in GGMLQuantizationType._value2member_map_:
        return False
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8), GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True
