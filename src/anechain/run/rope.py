"""The rotations that the host gives to a chain: angles in float64, only their cosines and sines are rounded."""

import math

import numpy as np

from anechain.bundle.spec import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float64: radians per position of each pair of dimensions (Su et al. 2021, eq. 15).

    "llama3" keeps short wavelengths, divides long ones by `factor` and blends between (Llama 3.1's config); "yarn" does
    so by dimension, between the two that turn `beta_fast` and `beta_slow` times in the original context (Peng et al.
    2023, section 3.2).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain: np.ndarray = rope.theta**-exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)  # in the original context
        share: np.ndarray = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        low, high = (_dimension(rope, head_dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        share = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    share = np.clip(share, 0.0, 1.0)  # 1: as trained; 0: stretched
    blended: np.ndarray = share * plain + (1 - share) * plain / rope.factor
    return blended


def _dimension(rope: Rope, head_dim: int, turns: float) -> float:
    """The pair of dimensions that makes `turns` turns in the original context (Peng et al. 2023, eq. 17, inverted)."""
    return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rotations(rope: Rope, head_dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions [Q] -> cos, sin [Q, head_dim] f16, both halves filled (half-split)."""
    angles = positions.astype(np.float64)[:, None] * inverse_frequencies(rope, head_dim)  # [Q, head_dim / 2]
    both = np.concatenate([angles, angles], axis=1)
    cos, sin = np.cos(both) * rope.attention_factor, np.sin(both) * rope.attention_factor
    return cos.astype(np.float16), sin.astype(np.float16)
