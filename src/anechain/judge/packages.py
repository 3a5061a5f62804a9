"""Which package is it? Each one is fed the oracle's hidden states and judged by what leaves it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from anechain.bake.source import Source
from anechain.errors import BundleError
from anechain.judge.baseline import Baseline
from anechain.judge.gate import MIN_COSINE
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain

# How rows [n, H] are fed: a package has a function for each way, and a fault may be in one alone.
_WAYS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "one by one": lambda rows: np.split(rows, len(rows)),
    "in chunks": lambda rows: [rows],
}


@dataclass(frozen=True)
class PackageReport:
    """One package over all tokens of a baseline's prompts, in chunks and one by one, its input exact to fp16."""

    file: str
    min_cosine: float  # of a token's hidden state with the oracle's; 0 where one is not finite
    max_error: float  # largest deviation, relative to the oracle's row's root mean square
    first_bad: str  # the place of the first token under the bar, "" if there is none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge_packages(
    chain: Chain, source: Source, baseline: Baseline, progress: Callable[[int, int, str], None] | None = None
) -> list[PackageReport]:
    """One report a package, in order. `chain` must hold one stage a package (`stitched=False`).

    Raises BundleError when `source` is not what the bundle was baked from.
    """
    bundle = chain.bundle
    if source.fingerprint != bundle.fingerprint:
        raise BundleError(
            f"{source.ref} is not what {bundle.path} was baked from (fingerprint {source.fingerprint[:12]} instead of "
            f"{bundle.fingerprint[:12]}): give the original checkpoint with --source."
        )
    answers = [a for a in baseline.answers if a.kind == "greedy"]
    entering: dict[int, list[np.ndarray]] = {}
    bounds = {b.start for b in bundle.blocks} | {b.stop for b in bundle.blocks}

    def record(layer: int, hidden: list[np.ndarray]) -> None:
        if layer in bounds:
            entering[layer] = [h.copy() for h in hidden]

    Oracle(source).forward([a.ids for a in answers], record=record)
    scale = np.float32(bundle.spec.stream_scale)
    reports = []
    for number, block in enumerate(bundle.blocks):
        if progress:
            progress(number, len(bundle.blocks), block.file)
        cosines, errors, bad = [], [], ""
        for answer, given, wanted in zip(answers, entering[block.start], entering[block.stop], strict=True):
            with np.errstate(over="ignore"):
                rows = (given * scale).astype(np.float16)  # [n, H]
            for way, pieces in _WAYS.items():
                session = chain.start()
                got = np.concatenate([chain.stage_feed(number, session, part) for part in pieces(rows)])
                for position, (row, target) in enumerate(zip(got.astype(np.float64) / scale, wanted, strict=True)):
                    cosine, error = _compare(target.astype(np.float64), row)
                    if not cosine >= MIN_COSINE and not bad:
                        bad = f"{answer.name} position {position} ({way})"
                    cosines.append(cosine)
                    errors.append(error)
        reports.append(PackageReport(block.file, min(cosines), max(errors), bad))
    return reports


def _compare(wanted: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    if not np.isfinite(got).all():
        return 0.0, float("inf")
    cosine = float(wanted @ got / (np.linalg.norm(wanted) * np.linalg.norm(got) or 1.0))
    return cosine, float(np.abs(wanted - got).max() / (np.sqrt(np.mean(wanted**2)) or 1.0))
