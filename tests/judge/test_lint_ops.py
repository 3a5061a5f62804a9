"""The rules on ops and patterns (O): each where it holds, and where it nearly does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from anechain.judge.compatibility import Machine
from tests.judge.lint_programs import BOOL, INT, WIDE, Spec, build, expect, half

EPS = np.float16(1e-5)


def root_of(mean: Any, name: str) -> Any:
    return mb.rsqrt(x=mb.add(x=mean, y=EPS), epsilon=np.float16(0), name=name)


def reduced(x: Any, name: str) -> Any:
    return mb.reduce_mean(x=x, axes=[-1], keep_dims=True, name=name)


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RMSNorm in every spelling, safe ones, LayerNorm, and squares that are no norm."""

    def body(x: Any, wide: Any) -> Any:
        top = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True), y=np.float16(1e-3))
        safe = mb.real_div(x=x, y=top, name="safe")
        inverted = mb.mul(x=x, y=mb.inverse(x=top, epsilon=np.float16(0)), name="inverted")
        centred = mb.sub(x=x, y=reduced(x, "centre"), name="centred")
        negative = mb.mul(x=x, y=np.float16(-1), name="negative")
        doubled = mb.concat(values=[x, negative], axis=1, interleave=False, name="doubled")
        average = mb.real_div(x=x, y=reduced(mb.abs(x=x), "size"), name="average")
        minus = [
            mb.mul(x=np.float16(-1), y=x), mb.sub(x=np.float16(0), y=x), mb.real_div(x=x, y=np.float16(-1)),
        ]  # fmt: skip
        pair = {"axis": 1, "interleave": False}
        signs = [mb.concat(values=[x, m], name=f"doubled_{i}", **pair) for i, m in enumerate(minus)]
        one_less = mb.concat(values=[x, mb.sub(x=np.float16(1), y=x)], name="one_less", **pair)
        twice = mb.concat(values=[x, mb.mul(x=x, y=np.float16(2))], axis=1, interleave=False, name="twice")

        def squares(name: str) -> Any:
            return mb.reduce_sum_square(x=x, axes=[-1], keep_dims=True, name=name)

        def length(name: str) -> Any:
            return mb.reduce_l2_norm(x=x, axes=[-1], keep_dims=True, name=name)

        norm = {"axes": [1], "gamma": half(64)}
        pairs = {"axes": [1], "gamma": half(128)}
        outs = [
            root_of(reduced(mb.square(x=x), "by_square"), "r1"),
            root_of(reduced(mb.mul(x=x, y=x), "by_mul"), "r2"),
            root_of(reduced(mb.pow(x=x, y=np.float16(2)), "by_pow"), "r3"),
            mb.sqrt(x=mb.mul(x=squares("by_sum"), y=np.float16(1 / 64)), name="r4"),
            mb.real_div(x=x, y=mb.mul(x=length("by_l2"), y=np.float16(1 / 8)), name="r5"),
            mb.mul(x=mb.real_div(x=x, y=length("with_gain")), y=half(64), name="r13"),
            mb.real_div(x=x, y=mb.sqrt(x=squares("only_sum")), name="r14"),
            mb.real_div(x=x, y=length("only_length"), name="r15"),
            mb.sqrt(x=reduced(mb.square(x=mb.sub(x=x, y=reduced(x, "mean"), name="off")), "deviation"), name="r16"),
            root_of(reduced(mb.square(x=safe), "of_safe"), "r6"),
            root_of(reduced(mb.square(x=inverted), "of_inverted"), "r7"),
            mb.mul(x=centred, y=root_of(reduced(mb.square(x=centred), "variance"), "r8")),
            mb.exp(x=reduced(mb.square(x=x), "energy"), name="r9"),
            root_of(reduced(mb.mul(x=x, y=safe), "product"), "r10"),
            root_of(reduced(mb.pow(x=x, y=np.float16(3)), "cube"), "r11"),
            mb.rsqrt(x=reduced(mb.square(x=wide), "in_fp32"), epsilon=np.float32(0), name="r12"),
            mb.layer_norm(x=x, beta=half(64), name="with_beta", **norm),
            mb.layer_norm(x=x, name="without_beta", **norm),
            mb.layer_norm(x=doubled, name="of_doubled", **pairs),
            mb.layer_norm(x=twice, name="of_twice", **pairs),
            mb.layer_norm(x=one_less, name="of_one_less", **pairs),
            *(mb.layer_norm(x=s, name=f"of_doubled_{i}", **pairs) for i, s in enumerate(signs)),
            root_of(reduced(mb.square(x=average), "of_average"), "r17"),
        ]
        return tuple(outs)

    path = tmp_path_factory.mktemp("norms") / "norms.mlpackage"
    return build(path, body, Spec((1, 64)), Spec((1, 64), WIDE))


def test_mean_of_squares_in_fp16(norms: Path) -> None:
    near = {"of_safe", "of_inverted", "variance", "energy", "product", "cube", "in_fp32", "only_sum", "only_length"}
    hits = {"by_square", "by_mul", "by_pow", "by_sum", "by_l2", "with_gain", "of_average"}
    expect(norms, "O1", hits, near=near | {"deviation"}, severity="E")


def test_layer_norm_that_stands_for_an_rms_norm(norms: Path) -> None:
    near = {"with_beta", "of_doubled", "of_doubled_0", "of_doubled_1", "of_doubled_2"}
    expect(norms, "O2", {"without_beta", "of_twice", "of_one_less"}, near=near, severity="E")


def test_layer_norm_in_single_ops(norms: Path) -> None:
    expect(norms, "O3", {"variance"}, near={"by_square", "with_beta", "deviation"}, severity="W")


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(q: Any, k: Any, flags: Any) -> Any:
        mask = np.triu(np.full((1, 1, 32, 32), -np.inf, np.float16), 1)
        finite = np.triu(np.full((1, 1, 32, 32), -40000, np.float16), 1)
        many = mb.tile(x=k, reps=[1, 2, 1, 1], name="many")
        same = mb.tile(x=q, reps=[1, 1, 1, 1], name="same")
        aside = mb.tile(x=k, reps=[1, 2, 1, 1], name="aside")
        scores = mb.matmul(x=same, y=many, transpose_y=True, name="scores")
        chosen = mb.select(cond=flags, a=scores, b=np.float16(-np.inf), name="chosen")
        return (
            mb.add(x=scores, y=mask, name="infinite"), mb.add(x=scores, y=finite, name="finite"), chosen,
            mb.select(cond=flags, a=scores, b=np.float16(-40000), name="chosen_finite"),
            mb.add(x=scores, y=np.float16(np.inf), name="positive"),
            mb.scaled_dot_product_attention(query=q, key=q, value=q, name="fused"), mb.exp(x=aside, name="out"),
        )  # fmt: skip

    path = tmp_path_factory.mktemp("attention") / "attention.mlpackage"
    return build(path, body, Spec((1, 4, 32, 32)), Spec((1, 2, 32, 32)), Spec((1, 1, 32, 32), BOOL))


def test_masks_of_minus_infinity(attention: Path) -> None:
    near = {"finite", "chosen_finite", "positive"}
    expect(attention, "O4", {"infinite", "chosen"}, near=near, severity="W")


def test_fused_attention(attention: Path) -> None:
    expect(attention, "O5", {"fused"}, near={"scores"}, severity="W")
    expect(attention, "O5", {"fused"}, near={"scores"}, severity="E", machine=Machine("iOS", (26, 1)))
    expect(attention, "O5", set(), severity="E", machine=Machine("iOS", (18,)))


def test_heads_that_are_repeated(attention: Path) -> None:
    found = expect(attention, "O6", {"many"}, near={"same", "aside"}, severity="W")
    assert found[0].detail == "tile by [1, 2, 1, 1] before scores (matmul)"


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(x: Any, cube: Any, where: Any, flat: Any) -> Any:
        table = half(16, 32)
        weights = half(32, 1, 1, 1), half(32, 16, 1, 1), half(64, 32, 1, 1)
        conv = {"pad_type": "valid"}
        picked = mb.gather(x=flat, indices=where, axis=1, validate_indices=False, name="picked")
        fixed = mb.gather(x=flat, indices=[0, 3], axis=1, validate_indices=False, name="fixed")
        looked_up = mb.gather(x=table, indices=where, axis=0, validate_indices=False, name="looked_up")
        soft = mb.softplus(x=flat, name="soft")
        mish = mb.mul(x=flat, y=mb.tanh(x=mb.softplus(x=flat, name="in_mish"), name="tanh"))
        return (
            mb.conv(x=x, weight=weights[0], groups=32, name="depthwise", **conv),
            mb.conv(x=x, weight=weights[1], groups=2, name="grouped", **conv),
            mb.conv(x=x, weight=weights[2], name="flat_conv", **conv),
            mb.conv(x=cube, weight=half(4, 2, 3, 3, 3), name="volume", **conv),
            mb.linear(x=flat, weight=half(16, 32), name="layer"), picked, fixed, looked_up,
            mb.reduce_argmax(x=flat, axis=-1, name="argmax"), *mb.topk(x=flat, k=2, axis=-1, name="top"),
            mb.reduce_max(x=flat, axes=[-1], name="maximum"), soft, mish, mb.sigmoid(x=flat, name="sigmoid"),
        )  # fmt: skip

    path = tmp_path_factory.mktemp("layers") / "layers.mlpackage"
    return build(path, body, Spec((1, 32, 1, 64)), Spec((1, 2, 4, 4, 4)), Spec((2,), INT), Spec((1, 32)))


def test_linear_layers(layers: Path, attention: Path) -> None:
    assert expect(layers, "O7", {None}, severity="I")[0].detail == "1 linear ops, such as layer"
    expect(attention, "O7", set(), near={"scores"})


def test_depthwise_convolution(layers: Path) -> None:
    expect(layers, "O8", {"depthwise"}, near={"grouped", "flat_conv"}, severity="W")


def test_depthwise_convolution_of_one_channel_is_none(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return mb.conv(x=x, weight=half(1, 1, 1, 3), pad_type="valid", groups=1, name="single")

    expect(build(tmp_path / "one.mlpackage", body, Spec((1, 1, 1, 32))), "O8", set(), near={"single"})


def test_ops_that_leave_the_engine(layers: Path) -> None:
    near = {"grouped", "fixed", "looked_up", "maximum"}
    expect(layers, "O9", {"volume", "picked", "argmax", "top"}, near=near, severity="W")


def test_argmax_on_ios_27(layers: Path) -> None:
    hits = {"argmax", "top"}
    expect(layers, "O9", hits, near={"volume", "picked"}, severity="E", machine=Machine("iOS", (27, 0)))
    expect(layers, "O9", set(), near={"argmax"}, severity="E", machine=Machine("macOS", (27, 0)))


def test_softplus_and_mish(layers: Path) -> None:
    found = expect(layers, "O10", {"soft", "in_mish"}, near={"tanh", "sigmoid"}, severity="W")
    assert {f.op: f.detail for f in found}["in_mish"].startswith("mish")


def rotary_table(function: Any, theta: float = 10000.0) -> np.ndarray:
    """[128, 64] of cos or sin, both halves filled."""
    angles = np.outer(np.arange(128), theta ** (-np.arange(32) / 32))
    return np.concatenate([function(angles)] * 2, axis=1).astype(np.float16)


def test_tables_that_are_picked_from(tmp_path: Path) -> None:
    padded = half(128, 64).clip(-1, 1)
    padded[0] = 0  # as an embedding with a padding row has it
    tables = {
        "cosines": rotary_table(np.cos), "sines": rotary_table(np.sin), "embedding": half(128, 64), "padded": padded,
        "ones": np.ones((128, 64), np.float16), "short": np.ones((2, 64), np.float16),
        "whole": np.arange(128 * 64).reshape(128, 64).astype(np.int32),
    }  # fmt: skip

    def body(ids: Any) -> Any:
        return tuple(
            mb.gather(x=table, indices=ids, axis=0, validate_indices=False, name=name) for name, table in tables.items()
        )

    package = build(tmp_path / "tables.mlpackage", body, Spec((4,), INT))
    others = {"embedding", "padded", "ones", "whole", "short"}
    expect(package, "O11", {"cosines", "sines"}, near=others, severity="W")
    expect(package, "O12", others, near={"cosines", "sines"}, severity="I")
    expect(package, "O9", set(), near=others)


def test_flat_convolutions(layers: Path, tmp_path: Path) -> None:
    assert expect(layers, "O15", {None}, severity="I")[0].detail.startswith("3 1x1 convolutions")

    def body(x: Any) -> Any:
        return mb.conv(x=x, weight=half(64, 32, 1, 1), pad_type="valid", name="square")

    for name, shape in (("square", (1, 32, 8, 8)), ("short", (1, 32, 1, 32)), ("odd", (1, 32, 1, 96))):
        package = build(tmp_path / f"{name}.mlpackage", body, Spec(shape))
        expect(package, "O15", set(), near={"square"})
