"""ModelSpec + weights -> the MIL program of one package. Every op of a chain is written in this file.

A block's function, for Q tokens (shapes at the end of the lines; C is channels):
hidden port -> [1, H, 1, Q] -> layers -> hidden_out port. Attention reads the past from the state, once, and the present
from this call's own keys and values; the new keys and values of all layers go to the state in one update at the end
(docs/decisions/0002-one-state-update.md).
"""

from collections.abc import Callable, Mapping

import numpy as np

from anechain.bake import mil as mb
from anechain.bake.mil import Function, Program, Var
from anechain.bundle.form import Form
from anechain.bundle.recipe import Recipe
from anechain.bundle.spec import (
    DECODE,
    FORM,
    MASKED,
    PREFILL,
    STATE,
    WRITE,
    ModelSpec,
    Ports,
    head_pieces,
    head_ports,
    kind_suffix,
    ports_of,
)
from anechain.bundle.stored import Palettized, Stored, expanded

# fp32 holds everything; fp16 needs rows to stay above the subnormals when they are divided by their maximum.
NORM_FLOOR = 2.0**-10

Weights = Mapping[str, Stored]


def block_program(
    spec: ModelSpec,
    recipe: Recipe,
    layers: range,
    context: int,
    prefill: int,
    weights: Weights,
    form: Form = FORM,
) -> Program:
    """The program of a package that holds `layers`: `decode` takes one token, `prefill` that many, if it is not 0.

    `weights` maps canonical names to float arrays or compressed ones, already scaled by `spec.stream_scale` where the
    residual stream is written. Both functions name the same weights, so that one copy is stored.
    """
    functions = {}
    for name, query in ((DECODE, 1), (PREFILL, prefill)):
        if query:
            ports = ports_of(spec, query, context, layers, form)
            functions[name] = _function(
                ports, lambda f, q=query: _block(_Graph(spec, recipe, q, weights), f, layers, context, form)
            )
    return Program(functions)


def head_program(spec: ModelSpec, recipe: Recipe, weights: Weights) -> Program:
    """The head: final norm and one 1x1 convolution a piece of the vocabulary; weights `final_norm`, `head.0`, ..."""

    def body(inputs: Mapping[str, Var]) -> list[Var]:
        graph = _Graph(spec, recipe, 1, weights)
        x = graph.cast(inputs["hidden"], "hidden_compute")  # [1, 1, 1, H]
        x = mb.transpose(x=x, perm=[0, 3, 1, 2], name="hidden_channels")  # [1, H, 1, 1]
        x = graph.rms_norm(x, "final_norm", 1, spec.stream_scale)
        outputs = []
        for i in range(head_pieces(spec)[0]):
            piece = graph.linear(x, f"head.{i}")  # [1, rows, 1, 1]
            outputs.append(graph.port(mb.transpose(x=piece, perm=[0, 2, 3, 1], name=f"head_{i}_rows"), f"logits_{i}"))
        return outputs  # [1, 1, 1, rows] each

    return Program({DECODE: _function(head_ports(spec), body)})


def _function(ports: Ports, body: Callable[[Mapping[str, Var]], list[Var]]) -> Function:
    inputs = {p.name: mb.placeholder(p.shape, p.dtype) for p in ports.inputs}
    if ports.state is not None:
        inputs[ports.state.name] = mb.state_placeholder(ports.state.shape)
    with Function(inputs) as function:
        function.set_outputs(body(function.inputs))
    return function


def _block(graph: "_Graph", inputs: Mapping[str, Var], layers: range, context: int, form: Form) -> list[Var]:
    spec, query = graph.spec, graph.query
    group = spec.n_heads // spec.n_kv_heads
    state = mb.read_state(input=inputs[STATE], name="past")  # [2k, n_kv, ctx, D] f16
    wide = graph.cast(state, "past_compute")
    past = mb.split(x=wide, num_splits=2 * len(layers), axis=0, name="past_rows")  # 2k x [1, n_kv, ctx, D]
    kinds = {}
    for kind in sorted({spec.layer_attention[i] for i in layers}):
        suffix = kind_suffix(spec, kind)
        cos, sin = (graph.cast(inputs[p + suffix], f"{p}{suffix}_compute") for p in ("cos", "sin"))  # [1, 1, Q, D]
        mask = graph.cast(inputs["mask" + suffix], f"mask{suffix}_compute")  # [1, 1, Q, ctx]
        if group > 1 and query > 1:  # the heads of a group lie one after another on the rows of the scores
            mask = mb.concat(values=[mask] * group, axis=2, name=f"mask{suffix}_group")  # [1, 1, G*Q, ctx]
        kinds[kind] = (cos, sin, mask)

    x = graph.arriving(inputs["hidden"], form.takes)  # [1, 1, Q, H]
    x = mb.transpose(x=x, perm=[0, 3, 1, 2], name="hidden_channels")  # [1, H, 1, Q]
    fresh: list[Var] = []
    for j, i in enumerate(layers):
        x, key, value = graph.layer(x, i, past[2 * j], past[2 * j + 1], *kinds[spec.layer_attention[i]])
        fresh += [key, value]
    kv = mb.concat(values=fresh, axis=0, name="fresh")  # [2k, n_kv, Q, D]
    if form.state_update == "blend":
        kv = graph.port(graph.blend(wide, kv, inputs[WRITE], context), "kv_next")
    else:
        kv = _slice(state, graph.port(kv, "fresh_state"), inputs)
    mb.coreml_update_state(state=inputs[STATE], value=kv, name="kv_updated")
    x = mb.transpose(x=x, perm=[0, 2, 3, 1], name="hidden_rows")  # [1, 1, Q, H]
    return [graph.leaving(x, form.gives)]


def _slice(state: Var, fresh: Var, inputs: Mapping[str, Var]) -> Var:
    """The state [2k, n_kv, ctx, D] with the new rows [2k, n_kv, Q, D] in it, where the host says."""
    whole = [True, True, False, True]  # only the third number of begin and end counts
    return mb.slice_update(
        x=state,
        update=fresh,
        begin=inputs["begin"],
        end=inputs["end"],
        begin_mask=whole,
        end_mask=whole,
        name="kv_next",
    )


class _Graph:
    """The vocabulary of one function: how each part of a transformer is written in MIL, at the recipe's precision."""

    def __init__(self, spec: ModelSpec, recipe: Recipe, query: int, weights: Weights) -> None:
        self.spec, self.query, self._weights = spec, query, expanded(weights)
        self._norm = recipe.norm
        self._dtype = "fp16" if recipe.compute == "fp16" else "fp32"
        self._consts: dict[str, Var] = {}
        self._float = np.float16 if recipe.compute == "fp16" else np.float32

    # Edges of the function: ports are fp16, whatever the program computes in.

    def cast(self, x: Var, name: str) -> Var:
        return x if self._dtype == "fp16" else mb.cast(x=x, dtype="fp32", name=name)

    def port(self, x: Var, name: str) -> Var:
        """`x` as fp16 under the port's name."""
        if self._dtype == "fp16":
            assert x.op is not None
            x.name = x.op.name = name
            return x
        return mb.cast(x=x, dtype="fp16", name=name)

    def arriving(self, x: Var, scale: float | None) -> Var:
        """The hidden state as it is computed with."""
        if scale is None:
            return self.cast(x, "hidden_compute")
        return mb.dequantize(input=x, scale=self._float(scale), name="hidden_compute")

    def leaving(self, x: Var, scale: float | None) -> Var:
        """The hidden state as the next package takes it."""
        if scale is None:
            return self.port(x, "hidden_out")
        return mb.quantize(input=x, scale=self._float(scale), output_dtype="int8", name="hidden_out")

    def blend(self, past: Var, fresh: Var, write: Var, context: int) -> Var:
        """past * (1 - m) + new * m, past [2k, n_kv, ctx, D], fresh [2k, n_kv, Q, D], write [1, 1, Q, ctx] of 0 and 1.

        Exact in any precision: every cell is one number times 1, plus zeros.
        """
        write = self.cast(write, "write_compute")
        column = [1, 1, context, 1]
        if self.query == 1:
            cells = mb.reshape(x=write, shape=column, name="write_cells")  # [1, 1, ctx, 1]
            placed = mb.mul(x=fresh, y=cells, name="kv_placed")  # [2k, n_kv, ctx, D]
        else:
            cells = mb.reduce_sum(x=write, axes=[2], keep_dims=True, name="write_any")  # [1, 1, 1, ctx]
            cells = mb.reshape(x=cells, shape=column, name="write_cells")
            placed = mb.matmul(x=write, y=fresh, transpose_x=True, name="kv_placed")
        keep = mb.sub(x=self._float(1), y=cells, name="write_not")
        return mb.add(x=mb.mul(x=past, y=keep, name="kv_kept"), y=placed, name="kv_blended")

    # Weights

    def const(self, name: str, value: np.ndarray, dtype: str | None = None) -> Var:
        """A constant, made once a function; the same `weight_id` in another function is stored once, too."""
        if name not in self._consts:
            self._consts[name] = mb.const(val=value, name=name.replace(".", "_"), dtype=dtype, weight_id=name)
        return self._consts[name]

    def vector(self, name: str, shape: tuple[int, ...]) -> Var:
        weight = self._weights[name]
        assert isinstance(weight, np.ndarray), name
        return self.const(name, weight.astype(self._float, copy=False).reshape(shape))

    def matrix(self, name: str) -> Var:
        """[O, I, 1, 1]: a plain constant, steps with their scales, or places in tables."""
        weight = self._weights[name]
        if isinstance(weight, np.ndarray):
            return self.const(name, weight.astype(self._float, copy=False)[:, :, None, None])
        dense = f"{name.replace('.', '_')}_dense"
        if isinstance(weight, Palettized):
            places = self.const(f"{name}.indices", weight.indices[:, :, None, None], f"uint{weight.bits}")
            table = self.const(f"{name}.table", weight.table.astype(self._float)[:, None, None, None, :, None])
            return mb.constexpr_lut_to_dense(indices=places, lut=table, name=dense)
        data = self.const(f"{name}.data", weight.data[:, :, None, None], f"int{weight.bits}")
        scale = self.const(f"{name}.scale", weight.scale.astype(self._float)[:, :, None, None])
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name=dense)

    # Parts

    def linear(self, x: Var, name: str) -> Var:
        """x [1, I, 1, Q] -> [1, O, 1, Q]; with the bias if the model has one, and the correction if the weight has."""
        stem, bias = name.replace(".", "_"), f"{name}_bias"
        if bias in self._weights:
            y = mb.conv(x=x, weight=self.matrix(name), bias=self._bias(bias), pad_type="valid", name=f"{stem}_out")
        else:
            y = mb.conv(x=x, weight=self.matrix(name), pad_type="valid", name=f"{stem}_out")
        if f"{name}.correction" not in self._weights:
            return y
        rest = self.linear(self.linear(x, f"{name}.correction_in"), f"{name}.correction")  # [1, r, 1, Q], [1, O, 1, Q]
        return mb.add(x=y, y=rest, name=f"{stem}_corrected")

    def _bias(self, name: str) -> Var:
        weight = self._weights[name]
        assert isinstance(weight, np.ndarray), name
        return self.const(name, weight.astype(self._float))

    def rms_norm(self, x: Var, name: str, axis: int, scale: float) -> Var:
        """RMSNorm over `axis` of a stream that carries `scale` (Zhang & Sennrich 2019, eq. 4), safe in fp16.

        k = max(max|x|, 2^-10); y = x / k; y * rsqrt(mean(y^2) + (sqrt(eps) * scale / k)^2) * gain: nothing leaves
        fp16's range for |x| up to 65 504, and a row of zeros stays zeros.
        """
        op = name.replace(".", "_")
        shape = (1, -1, 1, 1) if axis == 1 else (1, 1, 1, -1)
        if self._norm == "layer_norm":
            y = self._by_layer_norm(x, op, axis, scale)
            return mb.mul(x=y, y=self.vector(name, shape), name=f"{op}_out")
        k = mb.reduce_max(x=mb.abs(x=x, name=f"{op}_abs"), axes=[axis], keep_dims=True, name=f"{op}_max")
        k = mb.maximum(x=k, y=self._float(NORM_FLOOR), name=f"{op}_k")
        y = mb.real_div(x=x, y=k, name=f"{op}_y")
        mean = mb.reduce_mean(x=mb.mul(x=y, y=y, name=f"{op}_square"), axes=[axis], keep_dims=True, name=f"{op}_mean")
        eps = mb.real_div(x=self._float(np.sqrt(self.spec.rms_eps) * scale), y=k, name=f"{op}_eps")
        mean = mb.add(x=mean, y=mb.mul(x=eps, y=eps, name=f"{op}_eps_square"), name=f"{op}_mean_eps")
        # rsqrt adds an epsilon of its own; the one that fp16 can hold least is none.
        root = mb.rsqrt(x=mean, epsilon=self._float(0.0), name=f"{op}_rsqrt")
        y = mb.mul(x=y, y=root, name=f"{op}_unit")
        return mb.mul(x=y, y=self.vector(name, shape), name=f"{op}_out")

    def _by_layer_norm(self, x: Var, op: str, axis: int, scale: float) -> Var:
        """The norm without its gain, as one op: the mean of [x, -x] is 0, and its variance the mean of x^2."""
        negative = mb.mul(x=x, y=self._float(-1), name=f"{op}_negative")
        both = mb.concat(values=[x, negative], axis=axis, name=f"{op}_both")
        eps = self._float(self.spec.rms_eps * scale**2)
        normed = mb.layer_norm(x=both, axes=[axis], epsilon=eps, name=f"{op}_layer_norm")
        return mb.split(x=normed, num_splits=2, axis=axis, name=f"{op}_halves")[0]

    def heads(self, x: Var, n_heads: int, op: str) -> Var:
        """[1, n*D, 1, Q] -> [1, n, Q, D]"""
        x = mb.reshape(x=x, shape=[1, n_heads, self.spec.head_dim, self.query], name=f"{op}_heads")
        return mb.transpose(x=x, perm=[0, 1, 3, 2], name=f"{op}_rows")

    def rotate(self, x: Var, cos: Var, sin: Var, op: str) -> Var:
        """Rotary embedding, half-split (Su et al. 2021, eq. 34): x * cos + (-x2, x1) * sin, x [1, n, Q, D]."""
        first, second = mb.split(x=x, num_splits=2, axis=3, name=f"{op}_halves")
        turned = mb.concat(
            values=[mb.mul(x=second, y=self._float(-1), name=f"{op}_neg"), first], axis=3, name=f"{op}_turned"
        )
        cosine = mb.mul(x=x, y=cos, name=f"{op}_cos")
        return mb.add(x=cosine, y=mb.mul(x=turned, y=sin, name=f"{op}_sin"), name=f"{op}_rope")

    def attention(
        self, x: Var, i: int, past_k: Var, past_v: Var, cos: Var, sin: Var, mask: Var
    ) -> tuple[Var, Var, Var]:
        """x [1, H, 1, Q] normed -> (output [1, H, 1, Q], keys, values [1, n_kv, Q, D]).

        The heads that share a key/value head are rows of one matrix product, so keys and values are never repeated.
        """
        spec, query, op = self.spec, self.query, f"layers_{i}"
        n_kv, depth, group = spec.n_kv_heads, spec.head_dim, spec.n_heads // spec.n_kv_heads
        q = self.heads(self.linear(x, f"layers.{i}.q"), spec.n_heads, f"{op}_q")
        k = self.heads(self.linear(x, f"layers.{i}.k"), n_kv, f"{op}_k")
        v = self.heads(self.linear(x, f"layers.{i}.v"), n_kv, f"{op}_v")
        if spec.qk_norm:
            q = self.rms_norm(q, f"layers.{i}.q_norm", 3, 1.0)
            k = self.rms_norm(k, f"layers.{i}.k_norm", 3, 1.0)
        q, k = self.rotate(q, cos, sin, f"{op}_q"), self.rotate(k, cos, sin, f"{op}_k")
        q = mb.mul(x=q, y=self._float(spec.attention_scale), name=f"{op}_q_scaled")
        q = mb.reshape(x=q, shape=[1, n_kv, group * query, depth], name=f"{op}_q_groups")  # [1, n_kv, G*Q, D]

        before = mb.matmul(x=q, y=past_k, transpose_y=True, name=f"{op}_scores_past")  # [1, n_kv, G*Q, ctx]
        before = mb.add(x=before, y=mask, name=f"{op}_scores_past_masked")
        now = mb.matmul(x=q, y=k, transpose_y=True, name=f"{op}_scores_now")  # [1, n_kv, G*Q, Q]
        if query > 1:
            window = spec.attentions[spec.layer_attention[i]].window
            now = mb.add(x=now, y=self._causal(window, group), name=f"{op}_scores_now_masked")
        context = past_k.shape[2]
        weights = mb.softmax(
            x=mb.concat(values=[before, now], axis=3, name=f"{op}_scores"), axis=3, name=f"{op}_weights"
        )
        before, now = mb.split(x=weights, split_sizes=[context, query], axis=3, name=f"{op}_weights_apart")
        before = mb.matmul(x=before, y=past_v, name=f"{op}_mix_past")  # [1, n_kv, G*Q, D]
        mix = mb.add(x=before, y=mb.matmul(x=now, y=v, name=f"{op}_mix_now"), name=f"{op}_mix")
        mix = mb.reshape(x=mix, shape=[1, spec.n_heads, query, depth], name=f"{op}_mix_heads")
        mix = mb.transpose(x=mix, perm=[0, 1, 3, 2], name=f"{op}_mix_columns")  # [1, n, D, Q]
        mix = mb.reshape(x=mix, shape=[1, spec.n_heads * depth, 1, query], name=f"{op}_mix_channels")
        return self.linear(mix, f"layers.{i}.o"), k, v

    def _causal(self, window: int | None, group: int) -> Var:
        """[1, 1, G*Q, Q]: what the tokens of this call may see of each other; one constant for each kind of layer."""
        row, column = np.indices((self.query, self.query))
        visible = (column <= row) & (column > row - (window or self.query))
        mask = np.where(visible, 0.0, MASKED).astype(self._float)
        return self.const(f"causal_{window or 'full'}", np.tile(mask, (group, 1))[None, None])

    def feed_forward(self, x: Var, i: int) -> Var:
        """Gated feed-forward (Shazeer 2020): down(activation(gate(x)) * up(x)), x [1, H, 1, Q]."""
        op = f"layers_{i}"
        gate, up = self.linear(x, f"layers.{i}.gate"), self.linear(x, f"layers.{i}.up")
        if self.spec.activation == "silu":
            gate = mb.silu(x=gate, name=f"{op}_activation")
        else:
            gate = mb.gelu(x=gate, mode="TANH_APPROXIMATION", name=f"{op}_activation")
        return self.linear(mb.mul(x=gate, y=up, name=f"{op}_gated"), f"layers.{i}.down")

    def layer(self, x: Var, i: int, past_k: Var, past_v: Var, cos: Var, sin: Var, mask: Var) -> tuple[Var, Var, Var]:
        """One transformer layer on the residual stream x [1, H, 1, Q] -> (x, keys, values)."""
        spec, at = self.spec, f"layers.{i}"
        y = self.rms_norm(x, f"{at}.attn_norm", 1, spec.stream_scale)
        y, key, value = self.attention(y, i, past_k, past_v, cos, sin, mask)
        if spec.sandwich_norms:
            y = self.rms_norm(y, f"{at}.attn_post_norm", 1, 1.0)
        x = mb.add(x=x, y=y, name=f"layers_{i}_after_attention")
        y = self.rms_norm(x, f"{at}.ffn_norm", 1, spec.stream_scale)
        y = self.feed_forward(y, i)
        if spec.sandwich_norms:
            y = self.rms_norm(y, f"{at}.ffn_post_norm", 1, 1.0)
        return mb.add(x=x, y=y, name=f"layers_{i}_after_ffn"), key, value
