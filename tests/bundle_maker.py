"""Small bundles, made in this process: `make_bundle(tiny_source("qwen3"), tmp_path / "b", "int8", cuts=[1, 2])`.

The models are random, with weights that let every part matter: scores of order 1, logits whose spread is several units,
norm gains and biases far from 1 and 0. No matrix amplifies, so that rounding errors do not grow from layer to layer.
Every tensor has a seed of its own, made from its name.
"""

import functools
import hashlib
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from anechain.bake import package
from anechain.bake.jobs import Plan, make_plan, tools
from anechain.bake.source import Source
from anechain.bundle.embedding import TABLE
from anechain.bundle.manifest import HEAD, TOKENIZER, Block, Bundle, record_files, write_manifest
from anechain.bundle.recipe import Recipe, load_recipe
from anechain.bundle.rounded import Rounded
from anechain.bundle.spec import Attention, ModelSpec, Rope, matrices_of, tensors_of
from anechain.bundle.stored import compress, dense
from tests.tiny import write_tokenizer

_PLAIN = ModelSpec(
    family="llama", vocab_size=320, hidden_size=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, ffn_size=96,
    rms_eps=1e-5, attentions=(Attention("full", Rope(10000.0)),), layer_attention=(0, 0, 0), attention_scale=0.25,
    max_context=512,
)  # fmt: skip
_GEMMA = (
    Attention("full", Rope(1000000.0, "linear", factor=8.0)),
    Attention("sliding", Rope(10000.0), window=11),
)
# Each switch of a spec is on in one of these at least.
SPECS: dict[str, ModelSpec] = {
    "llama": _PLAIN,
    "llama-biases": replace(_PLAIN, qkv_bias=True, o_bias=True, ffn_bias=True),
    "qwen2": replace(_PLAIN, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(
        _PLAIN, family="qwen3", head_dim=32, attention_scale=32**-0.5, qk_norm=True, tied=True, rms_eps=1e-6,
        attentions=(Attention("full", Rope(1000000.0)),),
    ),
    "mistral": replace(
        _PLAIN, family="mistral", n_kv_heads=1, attentions=(Attention("sliding", Rope(10000.0), window=13),)
    ),
    "gemma3": replace(
        _PLAIN, family="gemma3", head_dim=24, attention_scale=20**-0.5, attentions=_GEMMA, layer_attention=(1, 0, 1),
        activation="gelu_tanh", qk_norm=True, sandwich_norms=True, embedding_scale=2.0, stream_scale=0.25, tied=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TensorSource:
    """A Source around arrays by canonical name."""

    spec: ModelSpec
    tensors: Mapping[str, np.ndarray]
    ref: str = "tensors"
    text_files: dict[str, bytes] = field(default_factory=dict)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.spec).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode() + self.tensors[name].tobytes())
        return digest.hexdigest()

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def tiny_source(spec: ModelSpec | str, seed: int = 0) -> TensorSource:
    """Random weights for a spec, or for one of SPECS by name."""
    spec = SPECS[spec] if isinstance(spec, str) else spec
    tensors = {name: _values(name, shape, seed) for name, shape in tensors_of(spec).items()}
    return TensorSource(spec, tensors, text_files=tokenizer_files())


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("norm"):
        values = rng.uniform(0.5, 2.0, shape)
    elif name.endswith("bias"):
        values = rng.uniform(0.3, 1.5, shape) * rng.choice([-1, 1], shape)
    elif name in ("embed", "head"):
        values = 0.5 * rng.standard_normal(shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(shape[1])
    return values.astype(np.float32)


@functools.cache
def tokenizer_files() -> dict[str, bytes]:
    """The byte-level tokenizer of tests.tiny, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def as_stored(source: TensorSource, recipe: Recipe | str) -> TensorSource:
    """The source whose matrices are exactly what `recipe` stores of those of `source`."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    tensors = {}
    for name, tensor in source.tensors.items():
        scheme = recipe.scheme_for(name, tensor.size) if name in matrices_of(source.spec) else None
        if scheme is not None and scheme.bits < 16:
            tensor = dense(compress(tensor, scheme, name)).astype(np.float32)
        tensors[name] = tensor
    return replace(source, tensors=tensors)


def deviation(got: np.ndarray, wanted: np.ndarray) -> float:
    """The root mean square error of the worst row of logits, relative to the spread of that row of `wanted` [n, V]."""
    assert got.shape == wanted.shape and got.ndim == 2 and got.size > 0 and np.isfinite(wanted).all()
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.sqrt(((got - wanted) ** 2).mean(axis=1)) / wanted.std(axis=1)).max())


def make_bundle(
    source: Source,
    out: Path,
    recipe: Recipe | str = "fp16",
    context: int = 64,
    prefill: int = 32,
    cuts: Sequence[int] | None = None,
    attach: Callable[[Path], None] | None = None,
    target: str = "macOS15",
    state_update: str = "slice",
    scales: Sequence[float] = (),
) -> Bundle:
    """Bakes `source` into the new folder `out`; `cuts` are the layers of each package, by default all in one.

    `attach` may put files into the folder before they are recorded, as in `bake.jobs.bake`.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    plan = make_plan(source, recipe, context, prefill, target, source.spec.n_layers, state_update)
    if cuts is not None:
        assert sum(cuts) == source.spec.n_layers, "the cuts do not hold all layers"
        bounds = pairwise(accumulate(cuts, initial=0))
        blocks = tuple(Block(f"block-{i:03d}.mlpackage", *ends) for i, ends in enumerate(bounds))
        plan = replace(plan, blocks=blocks, boundary_scales=tuple(scales))
    return bake_here(source, plan, out, attach)


def bake_here(source: Source, plan: Plan, out: Path, attach: Callable[[Path], None] | None = None) -> Bundle:
    """What `bake.jobs.bake` makes of a plan, without processes, locks, or an interrupted bake to go on with."""
    out.mkdir(parents=True)
    rounded = Rounded(Path(plan.rounded_file)) if plan.rounded_file else None
    for block in plan.blocks:
        made = out / block.file
        form = plan.form(block.file)
        package.make_block(
            source, plan.spec, plan.recipe, block.layers, plan.context, plan.prefill, made, form, rounded
        )
    package.make_head(source, plan.spec, plan.recipe, out / HEAD, plan.form(HEAD), rounded)
    if not plan.shares_table:
        package.make_embedding(source, plan.recipe, out)
    (out / TOKENIZER).mkdir()
    for name, content in source.text_files.items():
        (out / TOKENIZER / name).write_bytes(content)
    if attach:
        attach(out)
    bundle = Bundle(
        out, plan.spec, plan.recipe, plan.context, plan.prefill, plan.target, plan.ref, plan.fingerprint, plan.blocks,
        HEAD if plan.shares_table else TABLE, tools(), plan.key, record_files(out, out),
        stream_peak=plan.stream_peak, state_update=plan.state_update, boundary_scales=plan.boundary_scales,
        calibration=plan.calibration,
    )  # fmt: skip
    write_manifest(bundle)
    return bundle
