"""What is in a large file, as a hash: read whole once, and then known by the file's size, times and inode."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from anechain.bundle.manifest import sha256_of, write_atomically

KEPT = 256  # files
SETTLED_NS = 2_000_000_000  # a file that changed just now may change again within one tick of its clock
_THREADS = 2  # hashing releases the interpreter


def hashes(paths: Sequence[Path], memory: Path) -> list[str]:
    """The SHA-256 of each file. `memory` is a JSON file that holds what was hashed before; it can be deleted.

    Raises OSError for a file that cannot be read; a memory that cannot be read or written is none.
    """
    known = _known(memory)
    seen = {path: _seen(path) for path in paths}
    missing = [path for path in dict.fromkeys(paths) if known.get(str(path.resolve()), [None])[:-1] != seen[path]]
    with ThreadPoolExecutor(_THREADS) as pool:
        made = dict(zip(missing, pool.map(sha256_of, missing), strict=True))
    settled = [path for path in missing if seen[path] == _seen(path) and seen[path][1] + SETTLED_NS < time.time_ns()]
    if settled:
        known |= {str(path.resolve()): [*seen[path], made[path]] for path in settled}
        _remember(memory, dict(list(known.items())[-KEPT:]))
    return [made[path] if path in made else str(known[str(path.resolve())][-1]) for path in paths]


def _seen(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _known(memory: Path) -> dict[str, list[object]]:
    try:
        made = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(made, dict) or not all(isinstance(row, list) and row for row in made.values()):
        return {}
    return made


def _remember(memory: Path, known: dict[str, list[object]]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(memory, json.dumps(known).encode())
    except OSError:
        return
