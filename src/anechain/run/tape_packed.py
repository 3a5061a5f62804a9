"""Packed matrices kept on disk: the next start maps them, and reads, packs and copies nothing.

The kernels need pages of 2 MB (see tape_weights). A file's pages are that large where the system keeps it in its cache
in such pieces, as Linux does for what was written in large pieces to a file system that can. Where it does not, the
matrices are packed anew at each start, and nothing is kept.
"""

import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

LEAST_BYTES = 8 << 20  # less is packed at once
HUGE_SHARE = 0.75  # of the bytes must lie in pages of 2 MB
ROOM = 4  # times the size must be free on the disk
_POPULATE_READ = 22  # MADV_POPULATE_READ, which mmap does not name before Python 3.14
_PIECE = 64 << 20


def mapped(path: Path, size: int, first: int | None = None) -> tuple[int, mmap.mmap] | None:
    """The address of the `size` bytes of a file (or of the `first` ones), and what keeps them; None unless the file is
    there and has that size and large pages."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            size = min(size, first or size)
            held = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
        held.madvise(mmap.MADV_HUGEPAGE)
        held.madvise(_POPULATE_READ)
        address = int(np.frombuffer(held, np.uint8).__array_interface__["data"][0])
        return (address, held) if _huge_bytes(address) >= HUGE_SHARE * size else None
    except (OSError, ValueError, AttributeError):
        return None


def _huge_bytes(address: int) -> int:
    """How much of the mapping that begins at `address` lies in pages of 2 MB, as Linux tells it."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "-" in line.partition(" ")[0]:
                inside = int(line.partition("-")[0], 16) == address
            elif inside and line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) << 10
    return 0


def store(path: Path, address: int, size: int, held: object, done: Callable[[], None]) -> threading.Thread | None:
    """Writes the bytes at `address`, which `held` keeps, beside `path` and renames them: in a thread, which the end of
    the process waits for. `done` is called when all is well. None where there is nothing to do or no room."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if size < LEAST_BYTES or shutil.disk_usage(path.parent).free < ROOM * size:
            return None
    except OSError:
        return None
    thread = threading.Thread(target=_written, args=(path, address, size, held, done), name=f"keep {path.name}")
    thread.start()
    return thread


def _written(path: Path, address: int, size: int, held: object, done: Callable[[], None]) -> None:
    import ctypes

    data = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            for begin in range(0, size, _PIECE):
                file.write(data[begin : begin + _PIECE])
            file.flush()
            os.fsync(file.fileno())  # a name that a crash leaves must not stand for zeros
        if mapped(part, size, LEAST_BYTES) is not None:  # not all of it: it would be in memory twice
            os.replace(part, path)
            done()
    except OSError:
        pass
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
