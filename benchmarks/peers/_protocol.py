"""What `anechain bench --peers` and `peers_kl.py` ask of a script: flags, one JSON object, and exit code 3 where a
library is not there.

A script gives `main` two functions: one writes the source in the library's own format, once, in a process of its own,
so that its memory is not counted; the other one loads that.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NoReturn, Protocol

import numpy as np

REPEATS = 3  # of a prompt, as the bench does with its own engines


class Peer(Protocol):
    settings: str

    def timed(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        """A new conversation: seconds of `ids` up to the first token, and of each of `tokens` greedy ones after it."""

    def answers(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A new conversation: the logits [positions, V] behind each of `positions`, ascending, the last one the end.

        The ids up to the first position are fed as a prompt, the rest piece by piece.
        """


def not_there(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(3)


def main(format: str, convert: Callable[[Path, Path], object], load: Callable[[Path], Peer]) -> None:
    """`convert` writes a file or folder; `format` is its name, and part of where it is kept between runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--started", type=float, default=time.time(), help="when the process was, seconds since 1970")
    parser.add_argument("--answers", type=Path, nargs=2, help="an .npz of contexts, and one of logits to write")
    parser.add_argument("--convert", type=Path, help="only write the converted model, here")
    given = parser.parse_args()
    if not (given.source / "config.json").is_file():
        not_there(f"{given.source} is no Hugging Face directory on this machine")
    if given.convert:
        convert(given.source, given.convert)
        return
    model = _converted(given.source, format)
    waited_s = time.time() - given.started if _was_converted else 0.0
    begin = time.perf_counter()
    peer = load(model)
    load_s = time.perf_counter() - begin
    if given.answers:
        _answer(peer, *given.answers)
        return
    first_s, _ = peer.timed(_ids(given.prompt, 0), 0)
    start_to_first_s = time.time() - given.started - waited_s
    prompts = [peer.timed(_ids(given.prompt, 1 + i), 0)[0] for i in range(REPEATS)]
    _, spent = peer.timed(_ids(given.prompt, 1 + REPEATS), given.tokens)
    record = {
        "settings": peer.settings,
        "load_ms": load_s * 1e3,
        "first_token_ms": first_s * 1e3,
        "start_to_first_token_ms": start_to_first_s * 1e3,
        "prefill_tok_per_s": given.prompt / median(prompts),
        "decode_tok_per_s": 1 / median(spent),
        "peak_rss_bytes": _peak_rss_bytes(),
    }
    print(json.dumps(record))


def _ids(count: int, which: int) -> list[int]:
    """Another prompt each time: some libraries remember those that they have seen."""
    return np.random.default_rng(which).integers(1, 40000, count).tolist()


_was_converted = False


def _converted(source: Path, format: str) -> Path:
    """The source in the library's format: made in a process of its own unless it is there."""
    global _was_converted
    folder = Path(tempfile.gettempdir()) / "anechain-peers"
    folder.mkdir(exist_ok=True)
    about = f"{source.resolve()} {(source / 'model.safetensors').stat().st_mtime_ns}"
    model = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.{format}"
    if not model.exists():
        part = model.with_name(f"part-{model.name}")
        command = [sys.executable, sys.argv[0], "--source", str(source), "--convert", str(part)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        part.rename(model)
        _was_converted = True
    return model


def _answer(peer: Peer, contexts: Path, out: Path) -> None:
    with np.load(contexts) as file:
        count = len(file.files) // 2
        made = [peer.answers(file[f"ids_{i}"], file[f"positions_{i}"]) for i in range(count)]
    np.save(out, np.concatenate(made).astype(np.float32))
    print(json.dumps({"settings": peer.settings}))


def pieces(ids: np.ndarray, positions: np.ndarray) -> list[list[int]]:
    """What is fed before the logits of each position are looked at."""
    begins = [0, *(positions[:-1] + 1)]
    return [ids[begin : end + 1].tolist() for begin, end in zip(begins, positions, strict=True)]


def _peak_rss_bytes() -> int:
    """Of this process alone: what getrusage says starts with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
