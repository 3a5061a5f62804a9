"""Single instructions of the native library on numpy arrays, and whether it is there at all."""

import numpy as np
import pytest

from anechain.errors import EngineError
from anechain.run.native import Library, library
from anechain.run.tape_plan import Code, Instruction, Ref, tape_of
from anechain.run.tape_weights import fixed

Array = np.ndarray


def _missing() -> str:
    try:
        library()
    except EngineError as error:
        return str(error)
    return ""


MISSING = _missing()
needs_native = pytest.mark.skipif(bool(MISSING), reason=MISSING or "it is there")


def aligned(shape: tuple[int, ...], dtype: type) -> Array:
    """Zeros at a multiple of 64 bytes, as vectors are loaded from."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    begin = -room.__array_interface__["data"][0] % 64
    return room[begin : begin + size].view(dtype).reshape(shape)


def run(code: Code, *words: "int | Array | None", native: Library | None = None, scratch_bytes: int = 1 << 20) -> None:
    """One instruction; arrays are operands, None is one that is left out."""
    operands = [Ref(None) if w is None else Ref(fixed(w)) if isinstance(w, np.ndarray) else w for w in words]
    native = native or library()
    native.prepare(scratch_bytes)
    native.run(tape_of([Instruction(code, operands, (), (), True)])[0], np.zeros(3, np.uint64))
