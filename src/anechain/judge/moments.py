"""What a matrix is rounded by: second moments of its inputs, and of what they lack, each weighed by what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anechain.bundle.gptq import Halves

# Positions of a sequence, what is mixed there -> what errors cost there.
Weigh = Callable[[slice, np.ndarray], np.ndarray]
# What the square of an error costs: by position [N], by pairs of positions (`attention_pairs`), or everywhere the same.
Cost = np.ndarray | list[np.ndarray] | None


@dataclass(frozen=True)
class Moments:
    """Sums of x x^T [I, I] over the inputs x, and of y x^T, over two halves of the text.

    `lacks`: y is what the inputs lack of the original's [I, I]; or `of_results`, what the results do [O, I].
    """

    inputs: Halves
    lacks: Halves
    of_results: bool = False


def moments_of(given: np.ndarray, lack: np.ndarray, spans: Sequence[slice], cost: Cost) -> Moments:
    """Of inputs [N, I] and what is lacking [N, X], over every other sequence and over the rest; all f32.

    Only shares count: the sums are divided by all power.
    """
    inputs, lacks = [], []
    for first in (0, 1):
        mine = spans[first::2]
        x, y = (np.concatenate([rows[:0], *(rows[span] for span in mine)]) for rows in (given, lack))
        if isinstance(cost, list):
            mixed = np.concatenate([x[:0], *(p @ given[span] for p, span in zip(cost[first::2], mine, strict=True))])
            power = x.T @ mixed
            inputs.append((power + power.T) / 2)
            lacks.append(y.T @ mixed)
            continue
        if cost is not None:
            root = np.sqrt(np.concatenate([cost[:0], *(cost[span] for span in mine)]))[:, None]
            x, y = x * root, y * root
        inputs.append(x.T @ x)
        lacks.append(y.T @ x)
    total = np.float32(np.trace(inputs[0]) + np.trace(inputs[1]) + 1e-30)
    return Moments((inputs[0] / total, inputs[1] / total), (lacks[0] / total, lacks[1] / total))


def attention_pairs(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spans: Sequence[slice],
    scale: float,
    window: int | None,
    weigh: Weigh,
) -> list[np.ndarray]:
    """What errors of the values cost behind causal attention of q [N, heads, D] to k and v [N, n_kv, D]; all f32.

    For each sequence a matrix P [n, n]: with shares a [n, n] of a head, errors e [n, I] of what its values are made of
    become a e; so the squares of what they change, each position's weighed by w, add up to trace(e^T P e) with P = sum
    over heads of a^T diag(w) a. (A mean over positions knows nothing of the first one, which nearly everyone looks at.)
    `weigh` is given what is mixed, [n, heads * D], and says w [n].
    """
    heads, dim = q.shape[1:]
    n_kv = k.shape[1]
    group = heads // n_kv
    pairs = []
    for span in spans:
        n = span.stop - span.start
        at = np.arange(n)
        hidden = at > at[:, None]
        if window is not None:
            hidden |= at <= at[:, None] - window
        asking = (q[span] * np.float32(scale)).reshape(n, n_kv, group, dim).transpose(1, 2, 0, 3)
        keys, values = k[span].transpose(1, 0, 2), v[span].transpose(1, 0, 2)  # [n_kv, n, D]
        shares = asking.reshape(n_kv, group * n, dim) @ keys.transpose(0, 2, 1)  # [n_kv, group * n, n]
        by_row = shares.reshape(heads, n, n)
        by_row += np.where(hidden, np.float32(-np.inf), np.float32(0))
        shares -= shares.max(axis=-1, keepdims=True)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = (shares @ values).reshape(heads, n, dim).transpose(1, 0, 2).reshape(n, heads * dim)
        by_row *= np.sqrt(weigh(span, mixed))[:, None]
        flat = shares.reshape(heads * n, n)
        pairs.append(flat.T @ flat)
    return pairs
