"""Multiply-adds and stored bytes, against what PyTorch counts and what lies in the weight file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from anechain.judge.lint import lint
from anechain.judge.lint_packages import load_packages
from anechain.judge.lint_view import View, palette_bits
from tests.judge.lint_programs import BOOL, Spec, build, half


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it counts only what is taken apart
        run()
    return counter.get_total_flops()


def view_of(package: Path) -> View:
    (one,), _ = load_packages(package)
    (view,) = one.views
    return view


F = torch.nn.functional
Z = torch.zeros
# name -> (what the program does with x [2, 8, 6, 10] and y [2, 4, 6, 5], the same in PyTorch)
PRODUCTS: dict[str, tuple[Callable[[Any, Any, str], Any], Callable[[], Any]]] = {
    "conv": (
        lambda x, y, n: mb.conv(x=x, weight=half(12, 8, 3, 3), pad_type="valid", strides=[2, 1], name=n),
        lambda: F.conv2d(Z(2, 8, 6, 10), Z(12, 8, 3, 3), stride=(2, 1)),
    ),
    "grouped": (
        lambda x, y, n: mb.conv(x=x, weight=half(12, 2, 1, 3), pad_type="valid", groups=4, name=n),
        lambda: F.conv2d(Z(2, 8, 6, 10), Z(12, 2, 1, 3), groups=4),
    ),
    "turned": (
        lambda x, y, n: mb.conv_transpose(x=x, weight=half(8, 5, 2, 2), pad_type="valid", strides=[2, 2], name=n),
        lambda: F.conv_transpose2d(Z(2, 8, 6, 10), Z(8, 5, 2, 2), stride=2),
    ),
    "linear": (
        lambda x, y, n: mb.linear(x=mb.reshape(x=x, shape=[2, 48, 10]), weight=half(7, 10), name=n),
        lambda: F.linear(Z(2, 48, 10), Z(7, 10)),
    ),
    "matmul": (
        lambda x, y, n: mb.matmul(x=y, y=y, transpose_y=True, name=n),
        lambda: Z(2, 4, 6, 5) @ Z(2, 4, 5, 6),
    ),
    "matmul_turned": (
        lambda x, y, n: mb.matmul(x=y, y=y, transpose_x=True, name=n),
        lambda: Z(2, 4, 5, 6) @ Z(2, 4, 6, 5),
    ),
    "matmul_const": (
        lambda x, y, n: mb.matmul(x=y, y=half(5, 9), name=n),
        lambda: Z(2, 4, 6, 5) @ Z(5, 9),
    ),
    "attention": (
        lambda x, y, n: mb.scaled_dot_product_attention(
            query=mb.reshape(x=x, shape=[2, 4, 12, 10]), key=mb.reshape(x=x, shape=[2, 4, 12, 10]),
            value=mb.reshape(x=x, shape=[2, 4, 12, 10]), name=n,
        ),
        lambda: F.scaled_dot_product_attention(Z(2, 4, 12, 10), Z(2, 4, 12, 10), Z(2, 4, 12, 10)),
    ),
    "einsum": (
        lambda x, y, n: mb.einsum(values=(mb.reshape(x=x, shape=[2, 8, 3, 20]), mb.reshape(x=x, shape=[2, 20, 3, 8])),
                                  equation="bchw,bwhu->bchu", name=n),
        lambda: torch.einsum("bchw,bwhu->bchu", Z(2, 8, 3, 20), Z(2, 20, 3, 8)),
    ),
    "exp": (lambda x, y, n: mb.exp(x=x, name=n), lambda: Z(2, 8).exp()),
}  # fmt: skip


def test_multiply_adds_are_half_of_what_pytorch_counts(tmp_path: Path) -> None:
    def body(x: Any, y: Any) -> Any:
        return tuple(make(x, y, name) for name, (make, _) in PRODUCTS.items())

    view = view_of(build(tmp_path / "all.mlpackage", body, Spec((2, 8, 6, 10)), Spec((2, 4, 6, 5))))
    counted = {op.name: view.multiply_adds(op) for op in view.ops if op.name in PRODUCTS}
    assert counted == {name: flops(run) // 2 for name, (_, run) in PRODUCTS.items()}
    assert sum(n > 0 for n in counted.values()) == len(PRODUCTS) - 1


def test_multiply_adds_of_a_recurrent_layer(tmp_path: Path) -> None:
    """Counted by hand: each of 5 steps of 2 rows meets [4H, I] and [4H, H], I = 8, H = 16."""

    def body(x: Any, h: Any) -> Any:
        weights = {"weight_ih": half(64, 8), "weight_hh": half(64, 16)}
        return mb.lstm(x=x, initial_h=h, initial_c=h, direction="forward", output_sequence=True, name="l", **weights)[0]

    view = view_of(build(tmp_path / "lstm.mlpackage", body, Spec((5, 2, 8)), Spec((2, 16))))
    assert [view.multiply_adds(op) for op in view.of("lstm")] == [5 * 2 * (64 * 8 + 64 * 16)]


def test_stored_bytes(tmp_path: Path) -> None:
    """A weight counts as it lies in the file: packed, with its scales; what two ops share counts for each."""
    int4 = types.nptype_from_builtin(types.int4)
    uint3 = types.nptype_from_builtin(types.string_to_builtin("uint3"))

    def body(x: Any) -> Any:
        scale, lut = np.full((32, 2), 0.1, np.float16), half(1, 1, 8, 1)
        packed = mb.constexpr_blockwise_shift_scale(data=np.ones((32, 64), int4), scale=scale, name="packed")
        palette = mb.constexpr_lut_to_dense(indices=np.zeros((24, 64), uint3), lut=lut, name="palette")
        shared = mb.const(val=half(48, 64), name="shared")
        return (
            mb.linear(x=x, weight=packed, bias=half(32), name="a"), mb.linear(x=x, weight=palette, name="b"),
            mb.linear(x=x, weight=shared, name="c"), mb.linear(x=x, weight=shared, name="d"),
        )  # fmt: skip

    view = view_of(build(tmp_path / "bytes.mlpackage", body, Spec((1, 64))))
    stored = {op.name: sum(sum(w.parts.values()) for w in view.weights(op).values()) for op in view.of("linear")}
    shared = 48 * 64 * 2
    zeros = {"b": 24 * 2, "c": 48 * 2, "d": 48 * 2}  # the bias of zeros that the builder gives a linear
    assert stored == {
        "a": 32 * 64 // 2 + 32 * 2 * 2 + 32 * 2, "b": 24 * 64 * 3 // 8 + 8 * 2 + zeros["b"], "c": shared + zeros["c"],
        "d": shared + zeros["d"],
    }  # fmt: skip
    forms = {op.name: (w.form, w.bits) for op, _, w in view.matrices}
    assert forms == {"a": ("linear", 4), "b": ("lut", 3), "c": ("plain", 16), "d": ("plain", 16)}


@pytest.mark.parametrize(("lut", "bits"), [
    ((1, 1, 16, 1), 4), ((4, 1, 64, 2), 6), ((1, 1, 2, 1), 1), ((16,), 4), ((256,), 8), ((1, 1, 9, 1), 4),
])  # fmt: skip
def test_bits_of_a_palette(lut: tuple[int, ...], bits: int) -> None:
    assert palette_bits(lut) == bits


def test_ops_inside_of_control_flow_are_seen(tmp_path: Path) -> None:
    def body(x: Any, flag: Any) -> Any:
        pred = mb.squeeze(x=flag, name="pred")
        return mb.cond(
            pred=pred, _true_fn=lambda: mb.linear(x=x, weight=half(64, 64), name="inside"),
            _false_fn=lambda: mb.exp(x=x, name="outside"), name="choice",
        )  # fmt: skip

    view = view_of(build(tmp_path / "cond.mlpackage", body, Spec((1, 64)), Spec((1,), BOOL)))
    inside = next(op for op in view.ops if op.type == "linear")
    assert view.multiply_adds(inside) == 64 * 64
    assert [op.type for op, _, _ in view.matrices] == ["linear"] and "exp" in view.by_type


def test_functions_that_share_their_weights_count_them_once(tmp_path: Path) -> None:
    merge = ct.utils.MultiFunctionDescriptor()
    for size in (1, 32):
        path = tmp_path / f"{size}.mlpackage"
        build(path, lambda x: mb.linear(x=x, weight=half(64, 64), bias=half(64), name="y"), Spec((1, size, 64)))
        merge.add_function(str(path), "main", f"of_{size}")
    merge.default_function_name = "of_1"
    ct.utils.save_multifunction(merge, str(tmp_path / "both.mlpackage"))
    (share,) = lint(tmp_path / "both.mlpackage").shares
    assert share.weight_bytes == 64 * 64 * 2 + 64 * 2
    assert share.multiply_adds == 33 * 64 * 64
