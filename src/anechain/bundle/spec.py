"""What a model is, and what its packages exchange: every tensor's name, shape and dtype, written once.

Nothing here computes; `bake` builds packages to these ports, `run` feeds them, `judge` checks them.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from anechain.bundle.form import Form

MASKED = -40000.0  # exact in fp16; a score of up to -25 500 added to it stays finite
STATE = "kv"
WRITE = "write"  # the port of the state update "blend"
DECODE, PREFILL = "decode", "prefill"
FORM = Form()
MAX_PIECE = 16384  # the widest output that the ANE is published to take (rule S11)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one kind of layer; the fields are those of the Hugging Face config.

    `kind` is "default", "linear" (angles divided by `factor`), "llama3" (three bands) or "yarn".
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin (yarn); already resolved by the family
    truncate: bool = True  # yarn: whether the band's ends are rounded to whole dimensions


@dataclass(frozen=True)
class Attention:
    """One way of attending, shared by the layers that name it: its rotation and how far back it sees.

    With `window` w a token sees itself and the w - 1 tokens before it; None sees the whole context.
    """

    name: str  # "full" or "sliding"
    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, as data. Families differ in these fields and in nothing else."""

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    attentions: tuple[Attention, ...]
    layer_attention: tuple[int, ...]  # per layer, an index into `attentions`
    attention_scale: float
    max_context: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    sandwich_norms: bool = False  # a second norm after attention and after the feed-forward (Gemma 3)
    embedding_scale: float = 1.0
    stream_scale: float = 1.0  # a power of two that scales the whole residual stream (fp16 overflow)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "ModelSpec":
        attentions = tuple(Attention(a["name"], Rope(**a["rope"]), a["window"]) for a in data["attentions"])
        return ModelSpec(**{**data, "attentions": attentions, "layer_attention": tuple(data["layer_attention"])})


def layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of one layer's tensors, without the `layers.N.` in front.

    Norm gains are what multiplies (a checkpoint that stores `w` for `1 + w` is resolved by its Source);
    q and k are in half-split (Hugging Face) row order.
    """
    h, f = spec.hidden_size, spec.ffn_size
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (h,), "q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if spec.o_bias:
        shapes |= {"o_bias": (h,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.sandwich_norms:
        shapes |= {"attn_post_norm": (h,), "ffn_post_norm": (h,)}
    shapes |= {"ffn_norm": (h,), "gate": (f, h), "up": (f, h), "down": (h, f)}
    if spec.ffn_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (h,)}
    return shapes


def stream_writers(spec: ModelSpec) -> frozenset[str]:
    """The parts of a layer whose results go into the residual stream: they carry `stream_scale`."""
    if spec.sandwich_norms:
        return frozenset(("attn_post_norm", "ffn_post_norm"))
    return frozenset(("o", "o_bias", "down", "down_bias"))


LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def tensors_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of what a Source gives: `embed`, `layers.N.*`, `final_norm`, and `head` if untied."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden_size)}
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_tensors(spec).items()}
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tied:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def matrices_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Canonical name -> (outputs, inputs) of everything a recipe decides on; `head` is there when tied, too."""
    shapes = {n: s for n, s in tensors_of(spec).items() if len(s) == 2}
    shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return {n: (s[0], s[1]) for n, s in shapes.items()}


@dataclass(frozen=True)
class Port:
    """A named tensor at the edge of a package's function."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["fp16", "int32", "int8"] = "fp16"


@dataclass(frozen=True)
class Ports:
    """Inputs, outputs and state of one function, in order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: Port | None = None


def kind_suffix(spec: ModelSpec, kind: int) -> str:
    """`""` for a model with one kind of attention, else `_full`, `_sliding`: what its ports' names end in."""
    return "" if len(spec.attentions) == 1 else f"_{spec.attentions[kind].name}"


def ports_of(spec: ModelSpec, query: int, context: int, layers: range, form: Form = FORM) -> Ports:
    """The ports of a package that holds `layers`, for the function that takes `query` tokens at once.

    - `hidden`, `hidden_out` [1, 1, Q, H]: the residual stream times `spec.stream_scale`; int8 where the form has a
      scale for that end.
    - `cos*`, `sin*` [1, 1, Q, head_dim]: rotation of the Q positions, both halves filled (half-split).
    - `mask*` [1, 1, Q, context]: added to the scores against the *past*, which is the state before this call: 0 for
      the cells that row may see, MASKED for all others. What the Q tokens see of each other is fixed in the program.
    - state update "slice": `begin`, `end` int32 [4]: where in the state the new keys and values go. Only the third
      number counts, p and p + Q (the program takes the other axes whole), so that packages with different numbers of
      layers share these arrays.
    - state update "blend": `write` [1, 1, Q, context]: 1 where the new keys and values of that row go, 0 elsewhere.
    - state `kv` [2k, n_kv, context, head_dim]: rows 2j and 2j + 1 are the keys and the values of the j-th layer.
    """
    kinds = sorted({spec.layer_attention[i] for i in layers})
    rope = (1, 1, query, spec.head_dim)
    hidden = (1, 1, query, spec.hidden_size)
    inputs = [Port("hidden", hidden, "fp16" if form.takes is None else "int8")]
    for kind in kinds:
        suffix = kind_suffix(spec, kind)
        inputs += [Port(f"cos{suffix}", rope), Port(f"sin{suffix}", rope)]
        inputs += [Port(f"mask{suffix}", (1, 1, query, context))]
    if form.state_update == "blend":
        inputs += [Port(WRITE, (1, 1, query, context))]
    else:
        inputs += [Port("begin", (4,), "int32"), Port("end", (4,), "int32")]
    state = Port(STATE, (2 * len(layers), spec.n_kv_heads, context, spec.head_dim))
    output = Port("hidden_out", hidden, "fp16" if form.gives is None else "int8")
    return Ports(tuple(inputs), (output,), state)


def head_pieces(spec: ModelSpec) -> tuple[int, int]:
    """(pieces, rows of each) into which the head's vocabulary is cut; the last piece may end in rows of zeros.

    The fewest pieces of at most MAX_PIECE rows; an exact division is preferred as long as it needs fewer than twice
    as many, and so is a size clear of rule S16 (a core's share of the weights near a multiple of 1 MiB).
    """
    fewest = -(-spec.vocab_size // MAX_PIECE)
    counts = range(fewest, 2 * fewest + 1)

    def penalty(n: int) -> tuple[bool, bool, int]:
        rows = -(-spec.vocab_size // n)
        core_bytes = -(-rows // 16) * spec.hidden_size * 2
        distance = abs((core_bytes + 2**19) % 2**20 - 2**19)
        return (core_bytes > 2**19 and distance <= 2**14, spec.vocab_size % n != 0, n)

    best = min(counts, key=penalty)
    return best, -(-spec.vocab_size // best)


def head_ports(spec: ModelSpec) -> Ports:
    """The ports of the head package: `hidden` [1, 1, 1, H] to `logits_0` ... [1, 1, 1, rows], in vocabulary order."""
    pieces, rows = head_pieces(spec)
    outputs = tuple(Port(f"logits_{i}", (1, 1, 1, rows)) for i in range(pieces))
    return Ports((Port("hidden", (1, 1, 1, spec.hidden_size)),), outputs)
