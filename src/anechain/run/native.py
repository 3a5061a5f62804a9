"""The native library of the tape engine: found beside this file, where the package's build could make it."""

import ctypes
import functools
import importlib.machinery
import os
import time
from pathlib import Path

import numpy as np

from anechain.errors import EngineError
from anechain.run.tape_plan import FIXED, Code, Instruction, Ref, tape_of
from anechain.run.tape_view import Memory
from anechain.run.tape_weights import huge

_NAME = "_native"
_BASE_BYTES = 64


class Library:
    """The loaded library, and how many threads it runs."""

    def __init__(self, path: Path, threads: int) -> None:
        made = ctypes.CDLL(str(path))
        made.anechain_supported.restype = ctypes.c_int
        if not made.anechain_supported():
            raise EngineError(
                "the native engine needs a processor with AVX-512 VNNI, which this one is not: use OpenVINO."
            )
        made.anechain_prepare.argtypes = (ctypes.c_int, ctypes.c_size_t)
        made.anechain_prepare.restype = ctypes.c_int
        made.anechain_run.argtypes = (ctypes.c_void_p,) * 3
        made.anechain_run.restype = None
        self._library, self.threads = made, threads
        self._arenas: list[tuple[int, int, object]] = []  # address, bytes; a step that goes on keeps to its own
        self.prepare(_BASE_BYTES)

    def prepare(self, scratch_bytes: int) -> None:
        """Room for each thread to work in; the first call makes the threads."""
        self.threads = self._library.anechain_prepare(self.threads, scratch_bytes)
        if not self.threads:
            raise EngineError(f"there is no memory for {scratch_bytes} bytes a thread: free some, or bake shorter.")

    def arena(self, size: int) -> int:
        """The address of at least `size` bytes that any tape may use while it runs: no two run at the same time."""
        if not self._arenas or self._arenas[-1][1] < size:
            begin, held = huge(size)
            self._arenas.append((begin, size, held))
        return self._arenas[-1][0]

    def run(self, tape: np.ndarray, slots: np.ndarray, times: np.ndarray | None = None) -> None:
        """A tape, int64, with the addresses of its slots, uint64. Waits its turn, and releases the interpreter.

        Nanoseconds of each instruction are added to `times`, int64.
        """
        where = [None if a is None else a.__array_interface__["data"][0] for a in (tape, slots, times)]
        self._library.anechain_run(*where)

    def read_bandwidth(self, size: int = 1 << 28, times: int = 7) -> float:
        """Bytes a second that all threads together read from memory: the best of some times over `size` bytes."""
        begin, held = huge(size)
        np.frombuffer(held, np.uint8)[...] = 1  # pages that nobody wrote to are all the same page of zeros
        tape = tape_of([Instruction(Code.READ, (size, Ref(Memory(size, FIXED, begin))), (), (), True)])[0]
        best = 0.0
        for _ in range(times):
            start = time.perf_counter()
            self.run(tape, np.zeros(3, np.uint64))
            best = max(best, size / (time.perf_counter() - start))
        return best


def threads_wanted() -> int:
    """OMP_NUM_THREADS where it is set, as for other libraries; else the processors that this process may use."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def library(threads: int | None = None) -> Library:
    """Raises EngineError where the library was not built or cannot run here."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"{_NAME}{suffix}")
        if path.is_file():
            try:
                return Library(path, threads or threads_wanted())
            except OSError as error:
                raise EngineError(
                    f"{path} cannot be loaded ({error}): install anechain again, or use OpenVINO."
                ) from None
    raise EngineError(
        "the native engine was not built when anechain was installed: install it again where a C compiler is, or use "
        "OpenVINO."
    )
