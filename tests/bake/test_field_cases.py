"""What went wrong in conversions of others, asked of the packages that are written here."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bake.package import make_block, make_head
from anechain.bundle.form import Form
from anechain.bundle.program import read_program
from anechain.bundle.recipe import load_recipe
from anechain.bundle.spec import MASKED
from anechain.judge.oracle import Oracle
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from anechain.run.sample import greedy
from tests.bundle_maker import SPECS, make_bundle, tiny_source
from tests.tolerances import NORM_OF_A_TINY_ROW, NORM_OF_ANY_ROW

WIDTH = 64
ROWS: dict[str, np.ndarray] = {
    "one spike": np.eye(1, WIDTH, 5) * 3,
    "a spike of SmolLM2's stream": np.eye(1, WIDTH, 9) * 29307,
    "a stream of 2000": np.linspace(-2000, 2000, WIDTH)[None],
    "as large as fp16 holds": np.where(np.arange(WIDTH) % 3, 65504, -65504)[None],
    "ordinary": np.random.default_rng(4).standard_normal((1, WIDTH)),
}


def normed(row: np.ndarray, tmp_path: Path, stress: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the norm of a saved head gives (its matrix is the identity), and the formula in float64."""
    source = tiny_source(replace(SPECS["llama"], vocab_size=WIDTH, hidden_size=WIDTH))
    source = replace(source, tensors={**source.tensors, "head": np.eye(WIDTH, dtype=np.float32)})
    path = tmp_path / "head.mlpackage"
    make_head(source, source.spec, load_recipe("fp16"), path)
    out = {"logits_0": np.zeros((1, 1, 1, WIDTH), np.float16)}
    x = row.astype(np.float16)
    ReferenceEngine(stress).load([path]).step("decode", {"hidden": x[None, None]}, None, out)
    exact = x.astype(np.float64)
    gain = source.tensors["final_norm"].astype(np.float16).astype(np.float64)
    return out["logits_0"][0, 0], exact / np.sqrt(np.mean(exact**2) + source.spec.rms_eps) * gain


@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_a_norm_keeps_its_epsilon_and_does_not_overflow(name: str, stress: bool, tmp_path: Path) -> None:
    got, wanted = normed(ROWS[name], tmp_path, stress)
    assert np.isfinite(got).all() and np.abs(wanted).max() > 0.5
    assert np.abs(got - wanted).max() <= NORM_OF_ANY_ROW * np.abs(wanted).max()


@pytest.mark.parametrize("stress", [False, True])
def test_a_norm_of_a_row_that_is_nearly_zero(stress: bool, tmp_path: Path) -> None:
    got, wanted = normed(np.full((1, WIDTH), 1e-4), tmp_path, stress)
    assert np.abs(got - wanted).max() <= NORM_OF_A_TINY_ROW * np.abs(wanted).max()


def test_a_norm_of_zeros_is_zeros(tmp_path: Path) -> None:
    got, _ = normed(np.zeros((1, WIDTH)), tmp_path, False)
    assert not got.any()


@pytest.mark.parametrize("update", ["slice", "blend"])
def test_no_op_that_others_were_hurt_by(update: str, tmp_path: Path) -> None:
    """Angles in fp16, fused attention, ids of 16 bits, shapes that are computed: none of their ops is there."""
    source = tiny_source("gemma3")
    block, head = tmp_path / "block-000.mlpackage", tmp_path / "head.mlpackage"
    form = Form(state_update="blend" if update == "blend" else "slice")
    make_block(source, source.spec, load_recipe("fp16"), range(3), 64, 32, block, form)
    make_head(source, source.spec, load_recipe("fp16"), head, form)
    functions = [f for path in (block, head) for f in read_program(path).functions.values()]
    kinds = {op.type for f in functions for op in f.ops}
    assert len(functions) == 3 and "conv" in kinds
    assert not kinds & {
        *("cos", "sin", "scaled_dot_product_attention", "topk", "reduce_argmax", "shape", "gather", "fill"),
        *("range_1d", "non_zero", "layer_norm", "cast", "exp", "tile", "expand_dims"),
    }
    numbers = [v for f in functions for v in f.consts.values() if v.dtype.kind == "f"]
    assert all(v.dtype == np.float16 and np.isfinite(v).all() for v in numbers)
    assert min(v.min() for v in numbers) == MASKED == np.float16(MASKED)


@pytest.mark.parametrize("stress", [False, True])
def test_a_past_that_is_hidden_altogether(stress: bool, tmp_path: Path) -> None:
    """The first token sees no cell of the past, whose scores are as low as scores get: it sees itself."""
    bundle = make_bundle(tiny_source("llama"), tmp_path / "b")
    chain = Chain(bundle, ReferenceEngine(stress))
    logits = chain.feed(chain.start(), [3])
    assert np.isfinite(logits).all() and np.ptp(logits) > 0
    assert np.isfinite(np.float16(-25500) + np.float16(MASKED))


def test_a_winner_behind_65535_keeps_its_id(tmp_path: Path) -> None:
    """Ids of 16 bits would come back short by 65536."""
    source = tiny_source(replace(SPECS["llama"], vocab_size=70000, n_layers=1, layer_attention=(0,)))
    source.tensors["head"][:65536] *= 0.01
    bundle = make_bundle(source, tmp_path / "b")
    (hidden,) = Oracle(source).forward([np.array([66000, 12])])
    wanted = int(Oracle(source).logits(hidden[-1:])[0].argmax())
    assert wanted > 65535
    chain = Chain(bundle, ReferenceEngine())
    logits = chain.feed(chain.start(), [66000, 12])
    assert len(logits) == 70000 and greedy(logits, 70000) == wanted
