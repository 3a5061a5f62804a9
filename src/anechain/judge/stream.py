"""How far a model's residual stream reaches, and the power of two that keeps it within fp16."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.manifest import write_atomically
from anechain.errors import SourceError
from anechain.judge.oracle import Oracle, Progress
from anechain.judge.prompts import TEXTS

FP16_MAX = 65504.0
# What is measured is a massive activation that the first token of a text causes. Over 100 random first tokens it varies
# by a factor of 1.3 on SmolLM2-135M and 2.1 on Gemma3-270M, and none went beyond what the prompts showed: twice that is
# more than a text will need. More room would cost the small values, which it moves towards fp16's subnormals.
HEADROOM = 2.0
TOKENS = 8  # of each prompt

Encode = Callable[[str, bool], Sequence[int]]  # a text's ids, with or without what the tokenizer adds by itself


def probes(encode: Encode) -> tuple[np.ndarray, ...]:
    """The beginnings of the gate's prompts as ids, each with and without the tokenizer's own first token."""
    found = {
        tuple(encode(text, special)[:TOKENS]) for texts in TEXTS.values() for text in texts for special in (True, False)
    }
    return tuple(np.array(ids, np.int32) for ids in sorted(found) if ids)


def stream_peak(source: Source, sequences: Sequence[np.ndarray], progress: Progress | None = None) -> float:
    """The largest absolute value of the residual stream while the original reads `sequences`, rounded to whole numbers.

    Raises SourceError when it is not finite.
    """
    oracle = Oracle(source)
    oracle.forward(sequences, progress=progress)
    peak = float(oracle.stream_peak.max())
    if not math.isfinite(peak):
        raise SourceError(f"the residual stream of {source.ref} is not finite in float32: its weights are damaged.")
    return float(math.ceil(peak))  # as it is read back from the cache: two bakes write the same bytes


def stream_scale(peak: float) -> float:
    """The largest power of two, at most 1, that leaves HEADROOM between `peak` times it and fp16's largest number."""
    return 2.0 ** min(0, math.floor(math.log2(FP16_MAX / HEADROOM / max(peak, 1.0))))


def kept_peak(path: Path, measure: Callable[[], float]) -> float:
    """The peak in the file `path`; measured and written there where the file is not right."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["peak"]
        if isinstance(kept, int | float) and math.isfinite(kept) and kept >= 0:
            return float(kept)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    peak = measure()
    write_atomically(path, json.dumps({"peak": peak}).encode())
    return peak
