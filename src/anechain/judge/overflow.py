"""Where a chain's numbers stop being numbers: the first result of an op that is NaN or infinite."""

from collections.abc import Sequence

import numpy as np

from anechain.bundle.manifest import HEAD
from anechain.bundle.program import Op
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceStage, Watch


def first_overflow(chain: Chain, pieces: Sequence[np.ndarray]) -> str:
    """Feeds `pieces`, one after another, to a new session; a phrase about the first result that is not finite.

    It names the op, in whose name the layer is, and the package. "" when all is finite, and for an engine that lets
    nobody watch its ops.
    """
    names = [" or ".join(package.name for package in group) for group in chain.packages]
    stages = [*zip(names, chain.stages, strict=True), (HEAD, chain.head)]
    watched = [(name, stage) for name, stage in stages if isinstance(stage, ReferenceStage)]
    if len(watched) < len(stages):
        return ""
    found: list[str] = []
    session = chain.start()
    try:
        for name, stage in watched:
            stage.watch = _watcher(name, found)
        for ids in pieces:
            if not np.isfinite(chain.embedding.rows(ids)).all():
                return "a row of the embedding"
            chain.feed(session, ids)
            if found:
                return found[0]
    finally:
        for _, stage in watched:
            stage.watch = None
    return ""


def _watcher(package: str, found: list[str]) -> Watch:
    def watch(op: Op, result: np.ndarray) -> None:
        if not found and not np.isfinite(result).all():
            found.append(f"op {op.name!r} ({op.type}) in {package}")

    return watch
