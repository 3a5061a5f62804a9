"""onnxruntime-genai on what its own builder makes: int8 in blocks of 128, 8-bit activations, float32 keys and values.

The builder stores a tied embedding a second time, in float32, for int8: its rows are read, not the whole of it.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _protocol import main, not_there, pieces

sys.path.pop(0)  # this file has the name of the library
try:
    import onnxruntime_genai
except ImportError:
    not_there("onnxruntime-genai is not installed")

BLOCK = 128


def convert(source: Path, out: Path) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out)]
    options = [f"block_size={BLOCK}", "accuracy_level=4", "is_symmetric=true"]
    subprocess.run([*builder, "-p", "int8", "-e", "cpu", "--extra_options", *options], check=True)


class Engine:
    def __init__(self, model: Path) -> None:
        self._model = onnxruntime_genai.Model(str(model))
        version = onnxruntime_genai.__version__
        self.settings = f"onnxruntime-genai {version}, int8 in blocks of {BLOCK}, 8-bit activations, f32 cache"

    def _new(self, length: int) -> "onnxruntime_genai.Generator":
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        return onnxruntime_genai.Generator(self._model, params)

    def timed(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        generator = self._new(len(ids) + tokens + 1)
        begin = time.perf_counter()
        generator.append_tokens(np.array(ids, np.int32))
        generator.generate_next_token()
        first_s, spent = time.perf_counter() - begin, []
        for _ in range(tokens):
            begin = time.perf_counter()
            generator.generate_next_token()
            spent.append(time.perf_counter() - begin)
        return first_s, spent

    def answers(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        generator, made = self._new(len(ids) + 1), []
        for piece in pieces(ids, positions):
            generator.append_tokens(np.array(piece, np.int32))
            made.append(generator.get_logits().reshape(-1, generator.get_logits().shape[-1])[-1].copy())
        return np.array(made)


main("onnx", convert, Engine)
