"""CTranslate2: int8 weights of one scale a row, 8-bit activations of one scale a token, float32 for the rest.

Its logits are those of a whole sequence at once: it gives none of single tokens.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from _protocol import main, not_there

sys.path.pop(0)  # this file has the name of the library
try:
    import ctranslate2
except ImportError:
    not_there("ctranslate2 is not installed")


def convert(source: Path, out: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(out), quantization="int8")


class Engine:
    def __init__(self, model: Path) -> None:
        threads = len(os.sched_getaffinity(0))
        self._engine = ctranslate2.Generator(str(model), compute_type="int8", intra_threads=threads)
        self._words = json.loads((model / "vocabulary.json").read_text(encoding="utf-8"))
        self.settings = f"CTranslate2 {ctranslate2.__version__}, int8 a row, 8-bit activations a token, f32 cache"

    def timed(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        stamps: list[float] = []

        def told(step: object) -> bool:
            stamps.append(time.perf_counter())
            return False

        begin = time.perf_counter()
        self._engine.generate_batch(
            [[self._words[i] for i in ids]], max_length=tokens + 1, min_length=tokens + 1, sampling_topk=1,
            include_prompt_in_result=False, callback=told,
        )  # fmt: skip
        return stamps[0] - begin, np.diff(stamps).tolist()

    def answers(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        made = np.array(self._engine.forward_batch([ids.tolist()]))
        return made[0, positions]


main("ctranslate2", convert, Engine)
