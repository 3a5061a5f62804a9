"""How far hidden states reach where one package hands on to the next: the scales of int8 hand-offs."""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.form import boundary_scale
from anechain.bundle.manifest import write_atomically
from anechain.errors import SourceError
from anechain.judge.oracle import Oracle, Progress

TOKENS = 128  # of each paragraph

Encode = Callable[[str], Sequence[int]]


def calibration_texts() -> list[str]:
    """The paragraphs of data/calibration.txt: prose, code, letters, lists. None of the gate's prompts is among them."""
    text = (resources.files("anechain") / "data" / "calibration.txt").read_text(encoding="utf-8")
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


def calibration_ids(encode: Encode) -> list[np.ndarray]:
    """The beginning of every paragraph as ids."""
    return [np.array(ids, np.int32) for text in calibration_texts() if len(ids := list(encode(text))[:TOKENS])]


def layer_peaks(source: Source, sequences: Sequence[np.ndarray], progress: Progress | None = None) -> list[float]:
    """The largest absolute value of what enters each layer while the original reads `sequences`, unscaled.

    Raises SourceError when one is not finite.
    """
    peaks: list[float] = []
    Oracle(source).forward(
        sequences, record=lambda _, hidden: peaks.append(float(max(np.abs(h).max() for h in hidden))), progress=progress
    )
    if not np.isfinite(peaks).all():
        raise SourceError(f"the residual stream of {source.ref} is not finite in float32: its weights are damaged.")
    return peaks


def boundary_scales(peaks: Sequence[float], starts: Sequence[int], stream_scale: float) -> tuple[float, ...]:
    """One scale for each package that begins at a layer of `starts`, the first of which hands on from the embedding."""
    return tuple(boundary_scale(peaks[start] * stream_scale) for start in starts[1:])


def kept_peaks(path: Path, count: int, measure: Callable[[], list[float]]) -> list[float]:
    """The `count` peaks in the file `path`; measured and written there where the file is not right."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["peaks"]
        if len(kept) == count and all(isinstance(p, float) and np.isfinite(p) and p >= 0 for p in kept):
            return list(kept)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    peaks = measure()
    write_atomically(path, json.dumps({"peaks": peaks}).encode())
    return peaks
