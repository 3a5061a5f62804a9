"""llama.cpp through llama-cpp-python: Q8_0 weights, 8-bit activations in groups of 32, f16 keys and values."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _protocol import main, not_there, pieces

sys.path.pop(0)  # this file has the name of the library
try:
    import llama_cpp
except ImportError:
    not_there("llama-cpp-python is not installed")


def convert(source: Path, out: Path) -> None:
    subprocess.run([sys.executable, str(Path(__file__).with_name("_q8_gguf.py")), source, out], check=True)


class Engine:
    def __init__(self, model: Path) -> None:
        threads = len(os.sched_getaffinity(0))
        self._engine = llama_cpp.Llama(
            str(model), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.settings = f"llama.cpp {llama_cpp.__version__}, Q8_0, 8-bit activations in groups of 32, f16 cache"

    def timed(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        self._engine.reset()
        begin = time.perf_counter()
        self._engine.eval(ids)
        chosen = self._engine.sample(temp=0.0)
        first_s, spent = time.perf_counter() - begin, []
        for _ in range(tokens):
            begin = time.perf_counter()
            self._engine.eval([chosen])
            chosen = self._engine.sample(temp=0.0)
            spent.append(time.perf_counter() - begin)
        return first_s, spent

    def answers(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self._engine.reset()
        made = []
        for piece in pieces(ids, positions):
            self._engine.eval(piece)
            made.append(np.ctypeslib.as_array(self._engine._ctx.get_logits(), (self._engine.n_vocab(),)).copy())
        return np.array(made)


main("q8_0.gguf", convert, Engine)
