"""Instructions -> a tape: where in the arena each result lies, where threads wait for each other, numbers for C."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from anechain.run.tape_view import Memory, View

ARENA, FIXED, WEIGHTS, FIRST_FREE = 0, 1, 2, 3  # slots: the arena, addresses as they are, packed weights, then others
ALIGNMENT = 64  # bytes of a cache line, and of a vector
MAX_DIMS = 6  # as in native.h


class Code(IntEnum):
    """As in native/pool.c."""

    END = 0
    BARRIER = 1
    ELEMENT = 2
    COPY = 3
    REDUCE = 4
    SOFTMAX = 5
    PRODUCT = 6
    QUANTISE = 7
    LINEAR8 = 8
    LINEAR_FLOAT = 9
    SPAN = 10
    ATTENTION = 11
    PACK8 = 12
    PACK_FLOAT = 13
    NORM = 14
    ROTATE = 15
    READ = 16


@dataclass(frozen=True)
class Ref:
    """An operand: `at` bytes into a memory; None is an operand that is left out."""

    memory: Memory | None
    at: int = 0


def ref(view: View | None) -> Ref:
    return Ref(None) if view is None else Ref(view.memory, view.bytes_in)


@dataclass(frozen=True)
class Instruction:
    """`parallel`: all threads do a part of it; else the first one does all of it."""

    code: Code
    words: Sequence["int | Ref"]
    reads: Sequence[Memory]
    writes: Sequence[Memory]
    parallel: bool


@dataclass
class _Free:
    """The gaps of the arena, [begin, end), in order; the arena ends where it was ever used."""

    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0

    def take(self, size: int) -> int:
        for i, (begin, end) in enumerate(self.gaps):
            if end - begin >= size:
                self.gaps[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin, self.end = self.end, self.end + size
        return begin

    def give(self, begin: int, size: int) -> None:
        self.gaps.append((begin, begin + size))
        self.gaps.sort()
        joined: list[tuple[int, int]] = []
        for gap in self.gaps:
            if joined and joined[-1][1] == gap[0]:
                joined[-1] = (joined[-1][0], gap[1])
            else:
                joined.append(gap)
        self.gaps = joined


def arranged(instructions: Sequence[Instruction]) -> int:
    """Gives every memory of the arena its place, which others have before and after; returns the arena's bytes."""
    last = {m: i for i, made in enumerate(instructions) for m in (*made.reads, *made.writes) if m.slot == ARENA}
    dying: dict[int, list[Memory]] = {}
    for memory, i in last.items():
        dying.setdefault(i, []).append(memory)
    free, placed = _Free(), set()
    for i, made in enumerate(instructions):
        for memory in made.writes:
            if memory.slot == ARENA and memory not in placed:
                placed.add(memory)
                memory.at = free.take(_room(memory))
        for memory in dying.get(i, ()):
            free.give(memory.at, _room(memory))
    return free.end


def _room(memory: Memory) -> int:
    """With a few lines more: tensors a multiple of 4 kB apart keep each other waiting in the first cache."""
    return -(-memory.size // ALIGNMENT) * ALIGNMENT + 5 * ALIGNMENT


def codes_of(tape: np.ndarray) -> list[Code]:
    """What the instructions of a tape are, without its end."""
    codes, at = [], 0
    while tape[at] != Code.END:
        codes.append(Code(int(tape[at])))
        at += int(tape[at + 1])
    return codes


class Constants:
    """The arrays that a tape reads where they are, one behind another in one block of bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._places: dict[int, int] = {}  # by address
        self._size = 0

    def place(self, memory: Memory) -> int:
        """Where in the block the bytes of a memory are, which stay as they are from now on."""
        array = memory.owner
        assert isinstance(array, np.ndarray)
        if memory.at not in self._places:
            data = array.tobytes() + bytes(-array.nbytes % ALIGNMENT)
            self._places[memory.at] = self._size
            self._parts.append(data)
            self._size += len(data)
        return self._places[memory.at]

    def block(self) -> np.ndarray:
        return np.frombuffer(b"".join(self._parts), np.uint8)


def tape_of(instructions: Sequence[Instruction], constants: Constants | None = None) -> tuple[np.ndarray, np.ndarray]:
    """int64: the instructions, with barriers where threads must wait; and which words count from the constants' block.

    Memories have their places already. Without `constants` the addresses of arrays are written as they are.
    """
    words: list[int] = []
    counted: list[int] = []
    open_accesses: list[tuple[int, int, int, bool, bool]] = []  # since a barrier: slot, begin, end, writes, parallel

    def add(code: Code, parallel: bool, *operands: "int | Ref") -> None:
        start = len(words)
        words.extend((int(code), 0, int(parallel)))
        for operand in operands:
            if not isinstance(operand, Ref):
                words.append(int(operand))
            elif operand.memory is None:
                words.extend((-1, 0))
            elif operand.memory.slot == FIXED and constants is not None:
                counted.append(len(words) + 1)
                words.extend((FIXED, constants.place(operand.memory) + operand.at))
            else:
                words.extend((operand.memory.slot, operand.memory.at + operand.at))
        words[start + 1] = len(words) - start

    for made in instructions:
        if made.code == Code.BARRIER:
            open_accesses.clear()
            add(Code.BARRIER, True)
            continue
        mine = [
            (m.slot, m.at, m.at + m.size, writes, made.parallel)
            for memories, writes in ((made.reads, False), (made.writes, True))
            for m in memories
            if m.slot not in (FIXED, WEIGHTS)
        ]
        if any(_clash(a, b) for a in mine for b in open_accesses):
            add(Code.BARRIER, True)
            open_accesses.clear()
        open_accesses += mine
        add(made.code, made.parallel, *made.words)
    add(Code.END, True)
    return np.array(words, np.int64), np.array(counted, np.int64)


def _clash(a: tuple[int, int, int, bool, bool], b: tuple[int, int, int, bool, bool]) -> bool:
    """Whether two accesses of different threads must not be at the same time. What is serial is the same thread's."""
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[3] or b[3]) and (a[4] or b[4])
