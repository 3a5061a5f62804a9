"""Calibrated rounding of a whole model: one pass over the calibration tokens, a layer at a time.

Two streams of hidden states go through the layers: the original's, and that of the chain whose earlier matrices are
already rounded. Each matrix is rounded by what the second one brings it. The arithmetic is in bundle/gptq.py and
bundle/balance.py; what this makes is data for a bake (bundle/rounded.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.balance import Tie, balanced
from anechain.bundle.gptq import conditional_power, drift, round_matrix
from anechain.bundle.quant import Quantized
from anechain.bundle.recipe import Recipe, Scheme
from anechain.bundle.spec import ModelSpec, head_pieces, layer_tensors, stream_writers
from anechain.bundle.stored import Corrected, Stored, compress, dense
from anechain.judge.moments import Cost, Moments, attention_pairs, moments_of
from anechain.judge.oracle import attend, gelu_tanh, rms_norm, rotate, rotation, silu

Progress = Callable[[int, int], None]

ALGORITHM = 2  # counts changes of what the same recipe and text give: with another number, what is kept is not used
_MIN_SCALE, _MAX_SCALE = 2.0**-14, 500.0  # what a moved scale has to stay within


class Look(Protocol):
    """Who wants to see what the matrices are rounded from."""

    def matrix(self, name: str, weight: np.ndarray, moment: np.ndarray) -> None:
        """A weight [O, I], moved into its inputs, and the moment [I, I] of them: what `round_matrix` is given."""

    def rows(self, name: str, factors: np.ndarray) -> None:
        """A matrix that was seen before has its rows divided by `factors` [O]."""


class RoundedSource:
    """The source as a bundle with `tensors` computes it: what is rounded as its dense form, the rest as it is."""

    def __init__(self, source: Source, spec: ModelSpec, tensors: dict[str, Stored]) -> None:
        self._source, self._tensors = source, tensors
        self._writers = stream_writers(spec) if spec.stream_scale != 1 else frozenset()
        self.scale = np.float32(spec.stream_scale)
        # An untied head of its own, so that one that was rounded is not the embedding as well.
        self.spec = replace(spec, tied=spec.tied and "head.0" not in tensors)
        self.ref, self.fingerprint, self.text_files = source.ref, source.fingerprint, source.text_files

    def tensor(self, name: str) -> np.ndarray:
        if name == "head" and "head.0" in self._tensors:
            pieces = [self._tensors[f"head.{i}"] for i in range(head_pieces(self.spec)[0])]
            return np.concatenate([dense(p).astype(np.float32) for p in pieces])[: self.spec.vocab_size]
        if name not in self._tensors:
            return self._source.tensor(name)
        tensor = dense(self._tensors[name]).astype(np.float32)
        return tensor / self.scale if name.rpartition(".")[2] in self._writers else tensor


def round_model(
    source: Source,
    spec: ModelSpec,
    recipe: Recipe,
    tokens: Sequence[np.ndarray],
    progress: Progress | None = None,
    look: Look | None = None,
) -> dict[str, Stored]:
    """Every tensor that rounding by `recipe.calibration` changes, by canonical name, the head by its pieces.

    `spec` is the source's with the stream's scale decided; tensors that write to the stream carry it. `progress` counts
    layers. Raises RecipeError for weights that cannot be rounded.
    """
    walk = _Walk(source, spec, recipe, tokens, look)
    for layer in range(spec.n_layers):
        walk.attention(layer)
        walk.feed_forward(layer)
        if progress:
            progress(layer + 1, spec.n_layers + 1)
    walk.head()
    if progress:
        progress(spec.n_layers + 1, spec.n_layers + 1)
    return walk.tensors


class _Walk:
    """Both streams [N, H] f32 on their way through the layers: `exact` the original's, `stream` the rounded chain's."""

    def __init__(
        self, source: Source, spec: ModelSpec, recipe: Recipe, tokens: Sequence[np.ndarray], look: Look | None
    ) -> None:
        assert recipe.calibration is not None
        self.source, self.spec, self.recipe, self.look = source, spec, recipe, look
        self.methods = recipe.calibration.methods
        self.tensors: dict[str, Stored] = {}
        self._kept = lru_cache(len(layer_tensors(spec)))(source.tensor)  # as many as a layer has
        ends = np.cumsum([len(ids) for ids in tokens]).tolist()
        self.spans = [slice(end - len(ids), end) for end, ids in zip(ends, tokens, strict=True)]
        positions = np.concatenate([np.arange(len(ids)) for ids in tokens])
        self.turns = [rotation(a.rope, spec.head_dim, positions) for a in spec.attentions]
        self.level = self._level() if "level" in self.methods and not spec.sandwich_norms else None
        self.activation = silu if spec.activation == "silu" else gelu_tanh
        ids = np.concatenate(list(tokens))
        table = source.tensor("embed")
        scheme = recipe.scheme_for("embed", table.size)
        used, place = np.unique(ids, return_inverse=True)
        rows = table[used]
        self.exact = rows[place] * np.float32(spec.embedding_scale)
        if scheme.bits < 16:
            table = dense(compress(table, scheme, "embed"))
            rows = table[used].astype(np.float32)
        self.stream = rows[place] * np.float32(spec.embedding_scale)

    def _level(self) -> np.ndarray:
        """The direction [H] of the stream in which all logits change alike: the mean row of the head, with its norm."""
        head = self.source.tensor("embed" if self.spec.tied else "head")
        direction: np.ndarray = head.mean(axis=0) * self.source.tensor("final_norm")
        return direction / np.linalg.norm(direction)

    # Tensors of a layer, as the original has them and as they are rounded

    def original(self, layer: int, part: str) -> np.ndarray:
        return self._kept(f"layers.{layer}.{part}")

    def rounded(self, layer: int, part: str) -> np.ndarray:
        """What the chain computes with, without the stream's scale."""
        return RoundedSource(self.source, self.spec, self.tensors).tensor(f"layers.{layer}.{part}")

    def linear(self, layer: int, part: str, x: np.ndarray, exact: bool) -> np.ndarray:
        take = self.original if exact else self.rounded
        y: np.ndarray = x @ take(layer, part).T
        bias = f"{part}_bias"
        return y + take(layer, bias) if bias in layer_tensors(self.spec) else y

    def norm(self, layer: int, part: str, x: np.ndarray, exact: bool) -> np.ndarray:
        return rms_norm(x, (self.original if exact else self.rounded)(layer, part), self.spec.rms_eps)

    # The halves of a layer

    def attention(self, layer: int) -> None:
        spec = self.spec
        wanted, given = (self.norm(layer, "attn_norm", x, True) for x in (self.exact, self.stream))  # [N, H]
        result, pairs = self._attended(layer, wanted)
        give = self._into_norm(layer, "attn_norm")
        self.round(layer, ("q", "k", "v"), given, wanted - given, give, {"v": pairs})
        given = self._mix(layer, self.norm(layer, "attn_norm", self.stream, False), False)  # [N, heads * D]
        group = spec.n_heads // spec.n_kv_heads

        def tie(logs: np.ndarray) -> np.ndarray:
            heads = logs.reshape(spec.n_kv_heads, group, spec.head_dim)
            return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).ravel()

        give = self._into_rows(layer, "v", group)
        self._add(layer, "o", given / self._round_writer(layer, "o", given, result, give, tie), result)

    def feed_forward(self, layer: int) -> None:
        wanted, given = (self.norm(layer, "ffn_norm", x, True) for x in (self.exact, self.stream))
        inner = self.activation(self.linear(layer, "gate", wanted, True)) * self.linear(layer, "up", wanted, True)
        result = self.linear(layer, "down", inner, True)  # [N, H]
        costs = self._costs(layer, "down", self.exact, result) if "weigh" in self.methods else None
        give = self._into_norm(layer, "ffn_norm")
        self.round(layer, ("gate", "up"), given, wanted - given, give, {"gate": costs, "up": costs})
        given = self.norm(layer, "ffn_norm", self.stream, False)
        given = self.activation(self.linear(layer, "gate", given, False)) * self.linear(layer, "up", given, False)
        give = self._into_rows(layer, "up", 1)
        self._add(layer, "down", given / self._round_writer(layer, "down", given, result, give), result)

    def _attended(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray] | None]:
        """Normed x [N, H] of the original -> what its `o` writes [N, H], and what errors of its values cost."""
        if "weigh" not in self.methods:
            return self.linear(layer, "o", self._mix(layer, x, True), True), None
        spec, result = self.spec, np.empty_like(x)

        def weigh(span: slice, mixed: np.ndarray) -> np.ndarray:
            result[span] = self.linear(layer, "o", mixed, True)
            return self._costs(layer, "o", self.exact[span], result[span])

        window = spec.attentions[spec.layer_attention[layer]].window
        heads = self._heads(layer, x, True)
        return result, attention_pairs(*heads, self.spans, spec.attention_scale, window, weigh)

    def _costs(self, layer: int, part: str, stream: np.ndarray, result: np.ndarray) -> np.ndarray:
        """What the square of an error in `result` [n, H], which is added to the original's `stream`, costs at each
        position [n]: the next norm divides by what the stream has become. (A sequence's first position may have a
        hundred times the magnitude of all others, and nothing else would count.)
        """
        eps = np.float32(self.spec.rms_eps)
        cost = np.float32(1)
        if self.spec.sandwich_norms:
            cost = 1 / (np.mean(result * result, axis=-1) + eps)
            norm = "attn_post_norm" if part == "o" else "ffn_post_norm"
            result = self.norm(layer, norm, result, True)
        after = stream + result
        costs: np.ndarray = cost / (np.mean(after * after, axis=-1) + eps)
        return costs

    def _heads(self, layer: int, x: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Normed x [N, H] -> queries [N, heads, D], keys and values [N, n_kv, D], as attention sees them."""
        spec = self.spec
        q, k, v = (self.linear(layer, part, x, exact).reshape(len(x), -1, spec.head_dim) for part in ("q", "k", "v"))
        if spec.qk_norm:
            q, k = self.norm(layer, "q_norm", q, exact), self.norm(layer, "k_norm", k, exact)
        turn = self.turns[spec.layer_attention[layer]]
        return rotate(q, *turn), rotate(k, *turn), v

    def _mix(self, layer: int, x: np.ndarray, exact: bool) -> np.ndarray:
        """Normed x [N, H] -> what attention hands to `o` [N, heads * D]."""
        spec = self.spec
        q, k, v = self._heads(layer, x, exact)
        window = spec.attentions[spec.layer_attention[layer]].window
        mixed = np.empty((len(x), spec.n_heads * spec.head_dim), np.float32)
        for span in self.spans:
            keys, values = k[span].transpose(1, 0, 2), v[span].transpose(1, 0, 2)
            mixed[span] = attend(q[span], keys, values, spec.attention_scale, window)
        return mixed

    def _add(self, layer: int, part: str, given: np.ndarray, wanted: np.ndarray) -> None:
        """Adds what a half of the layer writes to both streams."""
        result = self.linear(layer, part, given, False)
        if self.spec.sandwich_norms:
            norm = "attn_post_norm" if part == "o" else "ffn_post_norm"
            wanted, result = self.norm(layer, norm, wanted, True), self.norm(layer, norm, result, True)
        self.exact, self.stream = self.exact + wanted, self.stream + result

    def head(self) -> None:
        """The head, unless it stays as it is or is the embedding, too: a table at both ends is rounded to nearest."""
        spec = self.spec
        table = "embed" if spec.tied else "head"
        matrix = self.source.tensor(table)  # [V, H]
        scheme = self.recipe.scheme_for("head", matrix.size)
        if scheme.bits == 16 or (spec.tied and scheme == self.recipe.scheme_for("embed", matrix.size)):
            return
        gain = self.source.tensor("final_norm")
        given, wanted = (rms_norm(x, gain, spec.rms_eps) for x in (self.stream, self.exact))
        pieces, rows = head_pieces(spec)
        names = [f"head.{i}" for i in range(pieces)]
        padded = np.pad(matrix, ((0, pieces * rows - len(matrix)), (0, 0)))
        weights = dict(zip(names, np.split(padded, pieces), strict=True))
        seen = dict.fromkeys(names, moments_of(given, wanted - given, self.spans, None))
        self._round(weights, dict.fromkeys(names, scheme), seen, self._into_vector("final_norm"))

    # Matrices that read the same

    def round(
        self,
        layer: int,
        parts: Sequence[str],
        given: np.ndarray,
        lack: np.ndarray,
        give: "_Give",
        costs: Mapping[str, Cost],
    ) -> None:
        """Rounds matrices that read `given` [N, I]; the original's inputs have `lack` [N, I] beyond that."""
        names = [f"layers.{layer}.{part}" for part in parts]
        weights = {name: self.original(layer, part) for name, part in zip(names, parts, strict=True)}
        schemes = {name: self.recipe.scheme_for(name, weight.size) for name, weight in weights.items()}
        made: dict[int, Moments] = {}  # parts whose errors cost the same see the same
        seen = {}
        for name, part in zip(names, parts, strict=True):
            cost = costs.get(part)
            if id(cost) not in made:
                made[id(cost)] = moments_of(given, lack, self.spans, cost)
            seen[name] = made[id(cost)]
        self._round(weights, schemes, seen, give)

    def _round_writer(
        self,
        layer: int,
        part: str,
        given: np.ndarray,
        result: np.ndarray,
        give: "_Give",
        tie: Tie | None = None,
    ) -> np.ndarray:
        """Rounds a matrix that reads `given` [N, I] and writes to the stream; the original's wrote `result` [N, H].

        Returns by what [I] its inputs are divided from now on. They are not computed anew: what makes them has only had
        its rows divided, which changes nothing else but the last bit of fp16 (of a scale, where a row has several).
        """
        name, bias = f"layers.{layer}.{part}", f"{part}_bias"
        weight = self.original(layer, part)
        lack = result - self.original(layer, bias) if bias in layer_tensors(self.spec) else result
        if not self.spec.sandwich_norms:  # where no norm comes between, it makes up for the stream's own drift, too
            lack = lack + (self.exact - self.stream)
        costs = self._costs(layer, part, self.exact, result) if "weigh" in self.methods else None
        seen = moments_of(given, lack, self.spans, costs)
        first, second = (y - weight @ x for x, y in zip(seen.inputs, seen.lacks, strict=True))
        seen = Moments(seen.inputs, (first, second), of_results=True)
        return self._round({name: weight}, {name: self.recipe.scheme_for(name, weight.size)}, {name: seen}, give, tie)

    def _round(
        self,
        weights: dict[str, np.ndarray],
        schemes: dict[str, Scheme],
        seen: dict[str, Moments],
        give: "_Give",
        tie: Tie | None = None,
    ) -> np.ndarray:
        """Rounds matrices that read the same; `give` moves factors into what makes it and says what it moved.

        Returns the factors [I] by which the inputs are divided from now on.
        """
        if "drift" in self.methods:
            weights = self._drifted(weights, seen)
        compressed = [name for name, scheme in schemes.items() if scheme.bits < 16]
        moments = {id(s): (s.inputs[0] + s.inputs[1]).astype(np.float64) for s in seen.values()}  # [I, I] each
        factors = np.ones(next(iter(weights.values())).shape[1], np.float32)
        if "scales" in self.methods and compressed:
            stacked = np.concatenate([weights[name] for name in compressed])
            powers = [conditional_power(moments[which]) for which in {id(seen[name]): 0 for name in compressed}]
            factors = give(balanced(stacked, np.sum([p / p.sum() for p in powers], axis=0), tie))
            moments = {which: moment / np.outer(factors, factors) for which, moment in moments.items()}
        writers = stream_writers(self.spec)
        for name, weight in weights.items():
            weight, moment = weight * factors, moments[id(seen[name])]
            if name.rpartition(".")[2] in writers:
                weight = weight * np.float32(self.spec.stream_scale)
            if self.look is not None:
                self.look.matrix(name, weight, moment)
            if schemes[name].bits < 16:
                level = self.level if name.rpartition(".")[2] in writers else None
                self.tensors[name] = round_matrix(weight, moment, schemes[name], self.methods, name, level)
            elif "drift" in self.methods or (factors != 1).any():
                self.tensors[name] = weight.astype(np.float16)
        return factors

    def _drifted(self, weights: dict[str, np.ndarray], seen: dict[str, Moments]) -> dict[str, np.ndarray]:
        """The matrices, changed so that they make up for what the chain before them has changed."""
        drifted = {}
        for which in {id(s): s for s in seen.values()}.values():
            mine = {name: weight for name, weight in weights.items() if seen[name] is which}
            if which.of_results:
                drifted |= {name: weight + drift(which.lacks, which.inputs) for name, weight in mine.items()}
            else:
                cost = sum(weight.T @ weight for weight in mine.values())
                back = drift(which.lacks, which.inputs, cost)  # [I, I]
                drifted |= {name: weight + weight @ back for name, weight in mine.items()}
        return {name: drifted[name] for name in weights}

    # Where factors go. What is moved is what the rounded producer really lost, so nothing is lost by the moving.

    def _into_norm(self, layer: int, part: str) -> "_Give":
        return self._into_vector(f"layers.{layer}.{part}")

    def _into_vector(self, name: str) -> "_Give":
        def give(factors: np.ndarray) -> np.ndarray:
            gain = self.source.tensor(name)
            moved = (gain / factors).astype(np.float16)
            self.tensors[name] = moved
            with np.errstate(divide="ignore", invalid="ignore"):
                taken = gain / moved.astype(np.float32)
            return np.where((moved != 0) & np.isfinite(taken), taken, factors).astype(np.float32)

        return give

    def _into_rows(self, layer: int, part: str, group: int) -> "_Give":
        """Into the rows of the matrix that makes the inputs; each row may serve a `group` of heads."""
        name, bias = f"layers.{layer}.{part}", f"layers.{layer}.{part}_bias"

        def give(factors: np.ndarray) -> np.ndarray:
            heads = factors.reshape(-1, group, self.spec.head_dim) if group > 1 else factors.reshape(-1, 1, 1)
            rows = heads[:, 0].ravel()  # [rows]: a group's factors are the same
            stored, rows = _divided(self.tensors.get(name, self.source.tensor(name).astype(np.float16)), rows)
            self.tensors[name] = stored
            if self.look is not None:
                self.look.rows(name, rows)
            if f"{part}_bias" in layer_tensors(self.spec):
                self.tensors[bias] = (self.source.tensor(bias) / rows).astype(np.float16)
            shape = heads.shape if group > 1 else (len(rows), 1, 1)
            return np.broadcast_to(rows.reshape(shape[0], 1, shape[2]), shape).reshape(-1).astype(np.float32)

        return give


_Give = Callable[[np.ndarray], np.ndarray]  # factors [I] -> the factors that were really moved [I] f32


def _divided(stored: Stored, rows: np.ndarray) -> tuple[Stored, np.ndarray]:
    """A matrix with row o divided by rows[o], and the factors by which it really was.

    Palettes have no rows to divide: they stay as they are.
    """
    if isinstance(stored, Corrected):
        base, rows = _divided(stored.base, rows)
        assert isinstance(base, Quantized) or base is stored.base
        return Corrected(base, (stored.up / rows[:, None]).astype(np.float16), stored.down), rows
    if isinstance(stored, Quantized):
        old = stored.scale.astype(np.float32)
        least, most = old.max(axis=1) / _MAX_SCALE, old.min(axis=1) / _MIN_SCALE
        new = (old / np.clip(rows, least, np.maximum(most, least))[:, None]).astype(np.float16)
        return Quantized(stored.data, new, stored.bits), (old / new.astype(np.float32)).mean(axis=1)
    if isinstance(stored, np.ndarray):
        return (stored.astype(np.float32) / rows[:, None]).astype(np.float16), rows
    return stored, np.ones_like(rows)
