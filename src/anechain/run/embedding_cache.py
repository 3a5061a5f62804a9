"""Where a tied embedding lies in the head's weight file, kept beside the tapes.

To find that in the head's program takes longer than everything else that a second start does before its first token:
the format's definitions alone are sixty modules.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bundle.embedding import Embedding, open_embedding
from anechain.bundle.manifest import HEAD, Bundle, write_atomically
from anechain.run.tape_cache import PROGRAM, WEIGHTS, folder

_PARTS = ("data", "scale", "palette")


def embedding_of(bundle: Bundle) -> Embedding:
    """`open_embedding`, by what was kept of the same head's program. Raises what that raises."""
    if bundle.embedding != HEAD:
        return open_embedding(bundle)
    weights = bundle.head_path.joinpath(*WEIGHTS)
    try:
        program = bundle.head_path.joinpath(*PROGRAM).read_bytes()
        code = Path(__file__).read_bytes()
        spec = f"{bundle.spec} {weights.stat().st_size}".encode()
    except OSError:
        return open_embedding(bundle)
    place = folder() / (hashlib.sha256(b"\0".join((code, spec, program))).hexdigest() + ".embedding")
    try:
        return _read(json.loads(place.read_text(encoding="utf-8")), weights)
    except (OSError, ValueError, LookupError, TypeError):
        made = open_embedding(bundle)
    if (record := _record(made, weights)) is not None:
        _write(place, json.dumps(record))
    return made


def _record(made: Embedding, weights: Path) -> dict[str, Any] | None:
    parts = {name: [_where(array, weights) for array in getattr(made, name)] for name in _PARTS}
    if any(row is None for rows in parts.values() for row in rows):
        return None
    return {"multiplier": made.multiplier, **parts}


def _where(array: np.ndarray, weights: Path) -> list[Any] | None:
    """dtype, shape and offset of an array that lies in the weight file as it is; None for any other."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or not array.flags.c_contiguous or str(base.filename) != str(weights.resolve()):
        return None
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return [array.dtype.str, list(array.shape), offset]


def _read(record: dict[str, Any], weights: Path) -> Embedding:
    file = np.asarray(np.memmap(weights, np.uint8, "r"))

    def arrays(rows: Sequence[list[Any]]) -> tuple[np.ndarray, ...]:
        made = []
        for dtype, shape, offset in rows:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            made.append(file[offset : offset + size].view(dtype).reshape(shape))
        return tuple(made)

    data, scale, palette = (arrays(record[name]) for name in _PARTS)
    if not data:
        raise ValueError("a table has at least one piece")
    return Embedding(data, scale, float(record["multiplier"]), palette)


def _write(place: Path, text: str) -> None:
    """Without a place to write to, nothing is kept."""
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(place, text.encode())
    except OSError:
        return
