"""What the original model says: a plain float32 forward pass in numpy, straight from the Source.

It is the other opinion, so it shares no code with what it judges: only the spec and the names of the tensors. It knows
nothing of packages, and `spec.stream_scale`, which is a property of theirs, is not looked at.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.spec import ModelSpec, Rope, layer_tensors, tensors_of
from anechain.errors import RequestError, SourceError

Progress = Callable[[int, int], None]  # (done, total)
Record = Callable[[int, list[np.ndarray]], None]  # (layer, hidden entering it, [n_i, H] f32 per sequence)

QUERY_ROWS = 64  # at a time, none looks further than the last of them: half of all scores are never made
FFN_ROWS = 1024


@dataclass
class Cache:
    """The rotated keys and the values of one sequence, per layer [n_kv, length, head_dim] f32."""

    length: int = 0
    keys: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[int, np.ndarray] = field(default_factory=dict)

    def extend(self, layer: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds [n_kv, n, head_dim] after the first `length` positions and returns all of them.

        `length` moves only when a whole forward pass is through, so that an interrupted one leaves the cache as it was.
        """
        if self.length:
            keys = np.concatenate([self.keys[layer][:, : self.length], keys], axis=1)  # [n_kv, length + n, D]
            values = np.concatenate([self.values[layer][:, : self.length], values], axis=1)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


class Oracle:
    """The model of `source`, with at most `keep_bytes` of weights kept between passes; the rest is read in every pass.

    Weights are kept in the order of first use, whole tensors only. Beside them a pass holds one tensor at a time.
    `stream_peak` [n_layers] f32 is the largest absolute value that the residual stream has had so far on entering each
    layer, between its two halves, and on leaving it.
    """

    def __init__(self, source: Source, keep_bytes: int = 2**30) -> None:
        self.spec: ModelSpec = source.spec
        self.fingerprint = source.fingerprint
        self.stream_peak = np.zeros(self.spec.n_layers, np.float32)
        self._source = source
        self._shapes = tensors_of(self.spec)
        self._layer_names = frozenset(layer_tensors(self.spec))
        self._kept: dict[str, np.ndarray] = {}
        self._room_bytes = keep_bytes

    def forward(
        self,
        tokens: Sequence[np.ndarray],
        caches: Sequence[Cache | None] | None = None,
        record: Record | None = None,
        progress: Progress | None = None,
    ) -> list[np.ndarray]:
        """Token ids [n_i] of several sequences -> the residual stream that leaves the last layer, [n_i, H] f32 each.

        Layer by layer: a layer's weights are read once and serve all sequences. With a cache a sequence goes on where
        the cache ends, and the cache grows; without one it begins at position 0 and nothing is kept. `record` is called
        with (i, hidden) for what enters layer i, and at the end with i = n_layers for what leaves the last one; the
        arrays are views that no one writes to again. `progress` counts layers.

        Raises RequestError for an empty sequence or an id outside the vocabulary, SourceError for a tensor whose shape
        is not the spec's.
        """
        spec = self.spec
        owned = [None] * len(tokens) if caches is None else list(caches)
        self._check(tokens, owned)
        starts = [0 if cache is None else cache.length for cache in owned]
        positions = [start + np.arange(len(ids)) for start, ids in zip(starts, tokens, strict=True)]
        turns = [rotation(a.rope, spec.head_dim, np.concatenate(positions)) for a in spec.attentions]
        ends = np.cumsum([len(ids) for ids in tokens]).tolist()
        spans = [slice(end - len(ids), end) for end, ids in zip(ends, tokens, strict=True)]

        x = self._tensor("embed")[np.concatenate(tokens)] * np.float32(spec.embedding_scale)  # [N, H]
        for layer in range(spec.n_layers):
            if record is not None:
                record(layer, [x[span] for span in spans])
            middle = x + self._attention(layer, x, turns[spec.layer_attention[layer]], spans, owned)  # [N, H]
            leaving = middle + self._ffn(layer, middle)  # [N, H]
            peaks = [np.abs(stream).max() for stream in (x, middle, leaving)]
            self.stream_peak[layer] = np.max([self.stream_peak[layer], *peaks])  # np.max keeps a NaN
            x = leaving
            if progress is not None:
                progress(layer + 1, spec.n_layers)
        for cache, ids in zip(owned, tokens, strict=True):
            if cache is not None:
                cache.length += len(ids)
        hidden = [x[span] for span in spans]
        if record is not None:
            record(spec.n_layers, hidden)
        return hidden

    def resumed(self, layer: int, entering: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rest of a pass without caches: what enters `layer` of each sequence [n_i, H] -> what leaves the last."""
        spec = self.spec
        positions = np.concatenate([np.arange(len(rows)) for rows in entering])
        turns = [rotation(a.rope, spec.head_dim, positions) for a in spec.attentions]
        ends = np.cumsum([len(rows) for rows in entering]).tolist()
        spans = [slice(end - len(rows), end) for end, rows in zip(ends, entering, strict=True)]
        x = np.concatenate(list(entering))  # [N, H]
        for i in range(layer, spec.n_layers):
            x = x + self._attention(i, x, turns[spec.layer_attention[i]], spans, [None] * len(spans))
            x = x + self._ffn(i, x)
        return [x[span] for span in spans]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Rows [n, H] that left the last layer -> [n, vocab_size] f32: the final norm, then the head."""
        rows = rms_norm(hidden, self._tensor("final_norm"), self.spec.rms_eps)  # [n, H]
        logits: np.ndarray = rows @ self._tensor("embed" if self.spec.tied else "head").T  # [n, V]
        return logits

    def _check(self, tokens: Sequence[np.ndarray], caches: Sequence[Cache | None]) -> None:
        if len(tokens) != len(caches):
            raise RequestError(f"{len(tokens)} sequences came with {len(caches)} caches: give one (or None) for each.")
        faults = [f"sequence {i} is empty" for i, ids in enumerate(tokens) if len(ids) == 0]
        faults += [
            f"sequence {i} has the ids {', '.join(str(t) for t in wrong)}"
            for i, ids in enumerate(tokens)
            if (wrong := sorted({int(t) for t in ids if not 0 <= t < self.spec.vocab_size}))
        ]
        if not tokens:
            faults.append("there is no sequence")
        if faults:
            last = self.spec.vocab_size - 1
            raise RequestError(f"the oracle cannot run: {'; '.join(faults)}; give ids of 0 to {last}, at least one.")

    def _tensor(self, name: str) -> np.ndarray:
        if (kept := self._kept.get(name)) is not None:
            return kept
        tensor = self._source.tensor(name)
        if tensor.shape != self._shapes[name] or tensor.dtype != np.float32:
            raise SourceError(
                f"tensor {name} of {self._source.ref} came as {tensor.dtype} {list(tensor.shape)}, where float32 "
                f"{list(self._shapes[name])} belongs: use a checkpoint whose config describes its weights."
            )
        if tensor.nbytes <= self._room_bytes:
            self._room_bytes -= tensor.nbytes
            self._kept[name] = tensor
        return tensor

    def _linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        y: np.ndarray = x @ self._tensor(f"layers.{layer}.{name}").T  # [N, outputs]
        if f"{name}_bias" in self._layer_names:
            y += self._tensor(f"layers.{layer}.{name}_bias")
        return y

    def _norm(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self._tensor(f"layers.{layer}.{name}"), self.spec.rms_eps)

    def _attention(
        self,
        layer: int,
        x: np.ndarray,
        turn: tuple[np.ndarray, np.ndarray],
        spans: Sequence[slice],
        caches: Sequence[Cache | None],
    ) -> np.ndarray:
        spec = self.spec
        h = self._norm(layer, "attn_norm", x)  # [N, H]
        q = self._linear(layer, "q", h).reshape(-1, spec.n_heads, spec.head_dim)  # [N, heads, D]
        k = self._linear(layer, "k", h).reshape(-1, spec.n_kv_heads, spec.head_dim)  # [N, n_kv, D]
        v = self._linear(layer, "v", h).reshape(-1, spec.n_kv_heads, spec.head_dim)  # [N, n_kv, D]
        if spec.qk_norm:
            q, k = self._norm(layer, "q_norm", q), self._norm(layer, "k_norm", k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        window = spec.attentions[spec.layer_attention[layer]].window
        mixed = np.empty((len(x), spec.n_heads * spec.head_dim), np.float32)  # [N, heads * D]
        for span, cache in zip(spans, caches, strict=True):
            keys, values = k[span].transpose(1, 0, 2), v[span].transpose(1, 0, 2)  # [n_kv, n, D]
            if cache is not None:
                keys, values = cache.extend(layer, keys, values)  # [n_kv, start + n, D]
            mixed[span] = attend(q[span], keys, values, spec.attention_scale, window)
        out = self._linear(layer, "o", mixed)  # [N, H]
        return self._norm(layer, "attn_post_norm", out) if spec.sandwich_norms else out

    def _ffn(self, layer: int, x: np.ndarray) -> np.ndarray:
        activation = silu if self.spec.activation == "silu" else gelu_tanh
        h = self._norm(layer, "ffn_norm", x)  # [N, H]
        out = np.empty_like(x)  # [N, H]
        for start in range(0, len(x), FFN_ROWS):
            rows = slice(start, start + FFN_ROWS)
            inner = activation(self._linear(layer, "gate", h[rows])) * self._linear(layer, "up", h[rows])  # [rows, F]
            out[rows] = self._linear(layer, "down", inner)
        return self._norm(layer, "ffn_post_norm", out) if self.spec.sandwich_norms else out


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """Over the last axis. Zhang and Sennrich 2019, eq. 4, with epsilon under the root as Llama has it."""
    normed: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * gain
    return normed


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp of more than 88 is inf, and x / inf is the 0 that is meant
        y: np.ndarray = np.exp(-x)
    y += 1
    return np.divide(x, y, out=y)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016, the approximation by tanh."""
    y: np.ndarray = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return y


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, window: int | None) -> np.ndarray:
    """Causal attention of the last n positions of one sequence, query heads in groups that share a key head.

    q [n, heads, D], keys and values [n_kv, total, D] -> [n, heads * D]; all f32. With `window` w a position sees itself
    and the w - 1 before it. Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 (groups).
    """
    n, heads, dim = q.shape
    n_kv, total, _ = keys.shape
    group = heads // n_kv
    asking = (q * np.float32(scale)).reshape(n, n_kv, group, dim).transpose(1, 0, 2, 3)  # [n_kv, n, group, D]
    out = np.empty((n, n_kv, group, dim), np.float32)
    for start in range(0, n, QUERY_ROWS):
        rows = asking[:, start : start + QUERY_ROWS]  # [n_kv, rows, group, D]
        at = total - n + start + np.arange(rows.shape[1])[:, None]  # [rows, 1] positions that ask
        first = 0 if window is None else max(0, int(at[0, 0]) - window + 1)
        last = int(at[-1, 0]) + 1
        seen = np.arange(first, last)[None]  # [1, span] positions that are looked at
        visible = seen <= at if window is None else (seen <= at) & (seen > at - window)  # [rows, span]
        weights = rows.reshape(n_kv, -1, dim) @ keys[:, first:last].transpose(0, 2, 1)  # [n_kv, rows * group, span]
        by_row = weights.reshape(n_kv, len(at), group, -1)
        by_row += np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        mixed = weights @ values[:, first:last]  # [n_kv, rows * group, D]
        mixed /= weights.sum(axis=-1, keepdims=True)
        out[start : start + QUERY_ROWS] = mixed.reshape(rows.shape).transpose(1, 0, 2, 3)
    return out.reshape(n, heads * dim)


def frequencies(rope: Rope, dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, [dim / 2] f64.

    default: Su et al. 2021, section 3.2.2. linear: Chen et al. 2023, position interpolation. yarn: Peng et al. 2023,
    section 3.2. llama3: the three bands of Meta's Llama 3.1 reference code. Parameters as in a Hugging Face config.
    """
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    slowed = plain / rope.factor
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return slowed
        case "llama3":
            turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            share = np.clip(share, 0, 1)
            return share * plain + (1 - share) * slowed
        case "yarn":
            # Where among the pairs of dimensions the one lies that makes `beta` turns within the original context.
            ends = [
                dim * math.log(rope.original_context / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
                for beta in (rope.beta_fast, rope.beta_slow)
            ]
            low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
            low, high = max(low, 0), min(high, dim - 1)
            ramp = np.arange(dim // 2) - low
            share = np.clip(ramp / (high - low if high != low else 0.001), 0, 1)  # 0.001 as Hugging Face has it
            return (1 - share) * plain + share * slowed


def rotation(rope: Rope, dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [n, 1, dim / 2] f32 at positions [n], computed in float64 and rounded once."""
    angles = positions.astype(np.float64)[:, None, None] * frequencies(rope, dim)  # [n, 1, dim / 2]
    scaled = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    return scaled[0].astype(np.float32), scaled[1].astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [n, heads, D] with dimension i turned together with dimension i + D / 2. Su et al. 2021, eq. 34, half-split."""
    a, b = np.split(x, 2, axis=-1)  # [n, heads, D / 2]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
