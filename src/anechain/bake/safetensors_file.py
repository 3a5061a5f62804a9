"""One safetensors file: its header checked, its tensors read one at a time from the mapped file.

The format: 8 bytes with the length of the header, little endian; a JSON header (name -> dtype, shape, begin and end of
the data counted from the header's end); the data. The library's own numpy reader has no bfloat16.
"""

import json
import math
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from anechain.errors import SourceError

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}  # the bits
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file; `begin` and `end` count from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """`entries`: tensor name -> Entry. Raises SourceError when the file is not a whole safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(max(8, len(_LFS)))
                if start == _LFS:
                    raise SourceError(f"{path} is a Git LFS pointer: fetch the real file with `git lfs pull`.")
                if size < 8:
                    raise SourceError(f"{path} is empty or cut off ({size} bytes): copy or download it again.")
                length = int.from_bytes(start[:8], "little")
                if length > min(_MAX_HEADER, size - 8):
                    raise SourceError(f"{path} is cut off or not a safetensors file: copy or download it again.")
                file.seek(8)
                header = file.read(length)
        except OSError as error:
            raise SourceError(f"{path} cannot be read ({error.strerror}): check it and its permissions.") from None
        self.entries = _entries(path, header, size)

    def stored(self, name: str) -> np.ndarray:
        """The tensor as it is in the file, a read-only view; of BF16 the bits, as uint16."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return np.zeros(entry.shape, FLOATS[entry.dtype])
        raw = np.memmap(self.path, np.uint8, "r", entry.begin, (entry.end - entry.begin,))
        return np.asarray(raw).view(FLOATS[entry.dtype]).reshape(entry.shape)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or some of its rows, as float32: the view that `stored` gives when it is stored so, a fresh array
        otherwise.
        """
        stored = self.stored(name)[rows]
        if self.entries[name].dtype == "BF16":
            bits: np.ndarray = stored.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        return np.require(stored, np.float32, "A")  # an odd offset in the file is no aligned array


def _entries(path: Path, header: bytes, size: int) -> dict[str, Entry]:
    fault = f"{path} has a damaged header: copy or download it again."
    data = 8 + len(header)
    try:
        parsed: dict[str, Any] = json.loads(header)
        parsed.pop("__metadata__", None)
        entries = {}
        for name, item in parsed.items():
            begin, end = (data + index(offset) for offset in item["data_offsets"])
            entries[name] = Entry(str(item["dtype"]), tuple(map(index, item["shape"])), begin, end)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise SourceError(fault) from None
    position = data
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        known = FLOATS.get(entry.dtype)
        n_bytes = entry.end - entry.begin
        if entry.begin != position or (known and math.prod(entry.shape) * known.itemsize != n_bytes):
            raise SourceError(fault)
        position = entry.end
    if position != size:
        raise SourceError(f"{path} has {size} bytes where its header says {position}: copy or download it again.")
    return entries
