"""Before the first request: does this chain, on this machine, still say what the original said?

A much coarser question than the gate's, which judges recipes: here an int8 chain passes that the gate fails, and what
does not pass is a damaged file or an engine that computes something else.
"""

from dataclasses import dataclass

import numpy as np

from anechain.errors import BundleError
from anechain.run.chain import Chain

# Centred cosine to the original's logits. The worst position of an int8 chain that fails the gate was 0.959; unrelated
# logits are near 0, a chain with one broken layer at most 0.7.
LEAST_COSINE = 0.9


@dataclass(frozen=True)
class Expected:
    """The original's logits [steps, V] f32 at the last `steps` positions of `ids`."""

    ids: tuple[int, ...]
    logits: np.ndarray


def self_check(chain: Chain, expected: Expected | None) -> float | None:
    """The lowest centred cosine over the recorded steps; None when nothing was recorded, and only finiteness is asked.

    Raises BundleError for logits that are not finite, constant, or too far from the recorded ones.
    """
    session = chain.start()
    ids = list(expected.ids) if expected else [0]
    first = len(ids) - (len(expected.logits) if expected else 1) + 1
    cosines = []
    for step in range(len(ids) - first + 1):
        logits = chain.feed(session, ids[:first] if step == 0 else ids[first + step - 1 : first + step])
        if not np.isfinite(logits).all() or np.ptp(logits) == 0:
            raise BundleError(
                f"bundle {chain.bundle.path} does not answer on the {chain.engine.name} engine: its logits are "
                f"{'constant' if np.isfinite(logits).all() else 'not finite'}; run `anechain gate --by-package`."
            )
        if expected:
            cosines.append(_centred_cosine(logits, np.asarray(expected.logits[step])))
    if cosines and min(cosines) < LEAST_COSINE:
        raise BundleError(
            f"bundle {chain.bundle.path} on the {chain.engine.name} engine is not what was baked: its logits have a "
            f"cosine of {min(cosines):.3f} to the recorded ones, and {LEAST_COSINE} is the least; bake it again."
        )
    return min(cosines) if cosines else None


def _centred_cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64) - a.mean(), b.astype(np.float64) - b.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))
