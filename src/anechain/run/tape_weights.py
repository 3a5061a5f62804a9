"""Matrices of a program, as the kernels read them: repacked once, into memory advised for huge pages.

Page walks, not memory, are the wall at which products of a matrix and a vector stand: with pages of 4 kB a token takes
half as long again. So the matrices are copied into pages of 2 MB, and the file's own pages are given back.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from anechain.run.ops_weight import WEIGHTS
from anechain.run.tape_plan import FIXED, Code, Instruction, Ref, tape_of
from anechain.run.tape_plan import WEIGHTS as WEIGHTS_SLOT
from anechain.run.tape_view import Memory

GROUP = 32  # the depth of a packed int8 matrix is a multiple of it, and so is every group of activations
BLOCK, PANEL = 16, 64  # rows in a vector, and rows that an int8 kernel does at once
_HUGE = 2 << 20
_PORTION = 32 << 20  # bytes that are packed before the pages they were read from are given back


def fixed(array: np.ndarray) -> Memory:
    """An array where it is; the memory keeps it alive."""
    return Memory(array.nbytes, FIXED, array.__array_interface__["data"][0], array)


@dataclass(frozen=True)
class Matrix:
    """[rows, depth], packed. int8: one scale a row, or for every GROUP inputs of a row ([N / 64][K / GROUP][64])."""

    kind: Literal["int8", "fp16", "fp32"]
    rows: int
    depth: int
    padded: int  # the depth that it is packed with
    memory: Memory
    row_scales: Memory | None = None
    part_scales: Memory | None = None


@dataclass(frozen=True)
class Job:
    """A matrix to be packed: the numbers of the instruction, where it is, and where it goes among the packed ones."""

    code: Code
    numbers: tuple[int, int, int]
    source: np.ndarray
    at: int


@dataclass(frozen=True)
class Stored:
    """constexpr_blockwise_shift_scale, as the file has it."""

    data: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None

    def dense(self) -> np.ndarray:
        parts = {"data": self.data, "scale": self.scale}
        return WEIGHTS["constexpr_blockwise_shift_scale"](None, **parts, **self._more())

    def _more(self) -> dict[str, np.ndarray]:
        return {} if self.offset is None else {"offset": self.offset}


class Matrices:
    """All matrices of a stage; the functions of a package share them. `pack` at the end, when all are known."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Matrix, object]] = {}
        self.jobs: list[Job] = []
        self.size = 0  # bytes of all of them, packed

    def get(self, weight: np.ndarray | Stored) -> Matrix:
        """The matrix [O, I] or [O, I, 1, 1] of a product."""
        array = weight.data if isinstance(weight, Stored) else weight
        scale = weight.scale.__array_interface__["data"][0] if isinstance(weight, Stored) else 0
        key = (array.__array_interface__["data"][0], array.shape, array.dtype.str, scale)
        if key not in self._known:
            self._known[key] = self._packed(weight), weight
        return self._known[key][0]

    def _packed(self, weight: np.ndarray | Stored) -> Matrix:
        if isinstance(weight, Stored):
            matrix = self._int8(weight)
            if matrix is not None:
                return matrix
            weight = weight.dense()
        wide = np.ascontiguousarray(weight.reshape(len(weight), -1))
        if wide.dtype != np.float16:
            wide = wide.astype(np.float32, copy=False)
        (rows, depth), size = wide.shape, wide.itemsize
        memory = self._room(-(-rows // BLOCK) * BLOCK * depth * size)
        self.jobs.append(Job(Code.PACK_FLOAT, (size, rows, depth), wide, memory.at))
        return Matrix("fp16" if size == 2 else "fp32", rows, depth, depth, memory)

    def _int8(self, weight: Stored) -> Matrix | None:
        """None for what is not int8 with one scale a row, or one for a multiple of GROUP inputs."""
        rows = len(weight.data)
        data = np.ascontiguousarray(weight.data.reshape(rows, -1))
        depth, padded = data.shape[1], -(-data.shape[1] // GROUP) * GROUP
        parts = weight.scale.size // len(weight.scale)
        part = depth // parts
        offset = weight.offset is not None and bool(np.any(weight.offset))
        if data.dtype != np.int8 or offset or rows % len(weight.scale) or (parts > 1 and part % GROUP):
            return None
        scales = np.repeat(weight.scale.reshape(len(weight.scale), parts), rows // len(weight.scale), axis=0)
        scales = scales.astype(np.float32)  # [rows, parts]
        memory = self._room(-(-rows // PANEL) * PANEL * padded)
        self.jobs.append(Job(Code.PACK8, (rows, depth, padded), data, memory.at))
        if parts == 1:
            return Matrix("int8", rows, depth, padded, memory, row_scales=fixed(scales))
        groups = depth // GROUP
        full = np.zeros((-(-rows // PANEL) * PANEL, groups), np.float32)
        full[:rows] = np.repeat(scales, part // GROUP, axis=1)
        tiled = np.ascontiguousarray(full.reshape(-1, PANEL, groups).transpose(0, 2, 1))
        return Matrix("int8", rows, depth, padded, memory, part_scales=fixed(tiled))

    def _room(self, size: int) -> Memory:
        memory = Memory(size, WEIGHTS_SLOT, self.size)
        self.size += -(-size // 4096) * 4096
        return memory


def pack(jobs: Sequence[Job], size: int, run: Callable[[np.ndarray, np.ndarray], None]) -> tuple[int, mmap.mmap]:
    """Packs all matrices with `run` (a tape and its slots); returns where they begin, and what keeps them."""
    begin, held = huge(size)
    portion: list[Job] = []
    for job in [*jobs, None]:
        if job is not None:
            portion.append(job)
        if job is None or sum(part.source.nbytes for part in portion) > _PORTION:
            operands = [(Ref(fixed(part.source)), Ref(Memory(0, WEIGHTS_SLOT, part.at))) for part in portion]
            made = [
                Instruction(part.code, (*part.numbers, *refs), (), (), True)
                for part, refs in zip(portion, operands, strict=True)
            ]
            run(tape_of(made)[0], np.array([0, 0, begin], np.uint64))
            for part in portion:
                _give_back(part.source)
            portion.clear()
    return begin, held


def huge(size: int) -> tuple[int, mmap.mmap]:
    """The address of `size` zero bytes, in pages of 2 MB where the system has them; and what keeps them."""
    held = private(size + _HUGE)
    address = np.frombuffer(held, np.uint8).__array_interface__["data"][0]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return -(-address // _HUGE) * _HUGE, held


def private(size: int) -> mmap.mmap:
    """Zero bytes of this process alone. Memory that could be shared, which is what mmap makes unless it is told, gets
    pages of 2 MB only where the system is set up to give such memory large pages, and few systems are."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) if hasattr(mmap, "MAP_PRIVATE") else mmap.mmap(-1, size)


def _give_back(array: np.ndarray) -> None:
    """The pages of a mapped file that an array lies in: they come back from the file when they are read again."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = array.__array_interface__["data"][0] - np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        base.madvise(mmap.MADV_DONTNEED, begin, end - begin)
