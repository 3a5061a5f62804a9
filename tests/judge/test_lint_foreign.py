"""Lint on packages that this project did not author: small PyTorch modules, traced and converted by coremltools.

What is expected of each was written down from its source, not from what lint said.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
import torch
from torch import nn

from anechain.judge.lint import Report, lint

pytestmark = pytest.mark.slow
HALF = np.float16


class Mlp(nn.Module):
    """A gated feed-forward behind a LayerNorm."""

    def __init__(self, hidden: int = 64, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """RMSNorm as transformers writes it, rotary tables, grouped heads repeated, and a fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.q, self.k, self.v, self.o = nn.Linear(64, 128), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(128, 64)
        angles = torch.outer(torch.arange(256.0), 10000.0 ** -(torch.arange(16) / 16))
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], 1))
        self.register_buffer("sin", torch.cat([angles.sin(), angles.sin()], 1))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        q, k, v = (f(y).view(1, 32, n, 32).transpose(1, 2) for f, n in ((self.q, 4), (self.k, 2), (self.v, 2)))
        cos, sin = self.cos[positions], self.sin[positions]
        q, k = (t * cos + torch.cat([-t[..., 16:], t[..., :16]], -1) * sin for t in (q, k))
        k, v = (t[:, :, None].expand(1, 2, 2, 32, 32).reshape(1, 4, 32, 32) for t in (k, v))
        mix = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=False)
        return x + self.o(mix.transpose(1, 2).reshape(1, 32, 128))


class Counter(nn.Module):
    """A state that is read, changed in a fixed slice, and used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("memory", torch.zeros(1, 8, width, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory[:, 0:1] = self.project(x).half()
        return x + self.memory.sum(1, keepdim=True)


class Pixels(nn.Module):
    """Convolutions, one of them depthwise, on an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(image)))))


def convert(module: nn.Module, inputs: list[Any], example: Any, **options: Any) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module.eval(), example)
    options.setdefault("minimum_deployment_target", ct.target.iOS18)
    return ct.convert(traced, inputs=inputs, skip_model_load=True, **options)


def tensor(name: str, *shape: Any, dtype: Any = HALF) -> Any:
    return ct.TensorType(name=name, shape=shape[0] if shape and isinstance(shape[0], ct.EnumeratedShapes) else shape,
                         dtype=dtype)  # fmt: skip


X = torch.zeros(1, 32, 64)


def judged(model: Any, tmp_path: Path) -> Report:
    model.save(str(tmp_path / "foreign.mlpackage"))
    return lint(tmp_path / "foreign.mlpackage")


def rules(report: Report, severity: str) -> set[str]:
    return {f.rule for f in report.findings if f.severity == severity}


def test_fp16(tmp_path: Path) -> None:
    report = judged(convert(Mlp(), [tensor("x", 1, 32, 64)], X, outputs=[ct.TensorType(dtype=HALF)]), tmp_path)
    assert rules(report, "E") == set() and report.clean
    assert rules(report, "W") == set()
    assert rules(report, "I") == {"O7", "V3"}
    assert report.shares[0].clear_multiply_adds == 3 * 32 * 64 * 128


def test_fp32(tmp_path: Path) -> None:
    wide = np.float32
    model = convert(Mlp(), [tensor("x", 1, 32, 64, dtype=wide)], X, compute_precision=ct.precision.FLOAT32)
    report = judged(model, tmp_path)
    assert rules(report, "E") == {"T1"}
    found = {f.op for f in report.findings if f.rule == "T1"}
    assert len(found) == 7  # norm, three linear, silu, product, sum
    assert rules(report, "W") == {"R3"}  # the output is fp32
    assert report.shares[0].clear_multiply_adds == report.shares[0].clear_weight_bytes == 0


def test_fp16_with_the_edges_of_an_older_target(tmp_path: Path) -> None:
    """Without dtypes the converter leaves fp32 outside for iOS 15, and casts."""
    inputs = [ct.TensorType(name="x", shape=(1, 32, 64))]
    report = judged(convert(Mlp(), inputs, X, minimum_deployment_target=ct.target.iOS15), tmp_path)
    assert rules(report, "E") == set()
    assert rules(report, "W") == {"T8", "R3"}
    assert len([f for f in report.findings if f.rule == "T8"]) == 2


@pytest.mark.parametrize(("shape", "grave", "warned"), [
    ((1, ct.RangeDim(1, 64, default=32), 64), {"S1"}, {"R3"}),
    ((ct.EnumeratedShapes([(1, 32, 64), (1, 64, 64)]),), set(), {"R3", "S3"}),
])  # fmt: skip
def test_flexible_shapes(shape: Any, grave: set[str], warned: set[str], tmp_path: Path) -> None:
    inputs, outputs = [tensor("x", *shape)], [ct.TensorType(dtype=HALF)]
    report = judged(convert(Mlp(), inputs, X, outputs=outputs), tmp_path)
    assert rules(report, "E") == grave
    assert rules(report, "W") == warned
    assert (report.shares[0].clear_weight_bytes == 0) == bool(grave)


def test_a_decoder_layer_as_transformers_writes_it(tmp_path: Path) -> None:
    inputs = [tensor("x", 1, 32, 64), tensor("positions", 32, dtype=np.int32)]
    example = (X, torch.arange(32, dtype=torch.int32))
    report = judged(convert(Llama(), inputs, example, outputs=[ct.TensorType(dtype=HALF)]), tmp_path)
    assert rules(report, "E") == {"O1", "S7"}  # mean of squares in fp16; heads repeated through a fifth axis
    assert {"O5", "O6", "O11", "T5"} <= rules(report, "W")
    assert not {"T1", "T2", "T8", "R3", "O3", "O4", "O9"} & rules(report, "W")
    assert "O12" not in rules(report, "I")  # the tables are not an embedding
    blocked = report.shares[0].multiply_adds - report.shares[0].clear_multiply_adds
    assert blocked == 0  # both are about what ops compute and carry, and none of them multiplies


def test_palettised(tmp_path: Path) -> None:
    model = convert(Mlp(), [tensor("x", 1, 32, 64)], X, outputs=[ct.TensorType(dtype=HALF)])
    config = cto.OpPalettizerConfig(
        nbits=4, mode="uniform", granularity="per_grouped_channel", group_size=16, weight_threshold=512
    )  # fmt: skip
    report = judged(cto.palettize_weights(model, cto.OptimizationConfig(global_config=config)), tmp_path)
    assert rules(report, "E") == set()
    assert rules(report, "W") == {"Q13"}
    assert rules(report, "I") == {"O7", "Q4"}
    (palettes,) = (f for f in report.findings if f.rule == "Q4")
    assert palettes.detail == "3 palettised weights of 4 bits, at most 8 palettes in one"
    biases_and_norm, indices, luts = (128 + 128 + 64 + 2 * 64) * 2, 3 * 64 * 128 // 2, (8 + 8 + 4) * 16 * 2
    assert report.shares[0].weight_bytes == biases_and_norm + indices + luts


def test_palettised_with_scales(tmp_path: Path) -> None:
    model = convert(Mlp(), [tensor("x", 1, 32, 64)], X, outputs=[ct.TensorType(dtype=HALF)])
    config = cto.OpPalettizerConfig(
        nbits=6, mode="uniform", granularity="per_grouped_channel", group_size=16, enable_per_channel_scale=True,
        weight_threshold=512,
    )  # fmt: skip
    report = judged(cto.palettize_weights(model, cto.OptimizationConfig(global_config=config)), tmp_path)
    assert rules(report, "E") == {"Q5"}
    assert len([f for f in report.findings if f.rule == "Q5"]) == 3


@pytest.mark.parametrize(("granularity", "grave"), [
    ("per_channel", set()), ("per_tensor", set()), ("per_block", {"Q1"}),
])  # fmt: skip
def test_int8(granularity: str, grave: set[str], tmp_path: Path) -> None:
    model = convert(Mlp(), [tensor("x", 1, 32, 64)], X, outputs=[ct.TensorType(dtype=HALF)])
    config = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", granularity=granularity, block_size=32, weight_threshold=512
    )
    report = judged(cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config)), tmp_path)
    assert rules(report, "E") == grave
    assert ("Q2" in rules(report, "I")) == (not grave)
    assert len([f for f in report.findings if f.rule == "Q1"]) == (3 if grave else 0)
    clear = report.shares[0].clear_multiply_adds
    assert clear == (0 if grave else 3 * 32 * 64 * 128)


@pytest.mark.parametrize(("width", "grave"), [(64, set()), (48, {"K9"})])
def test_stateful(width: int, grave: set[str], tmp_path: Path) -> None:
    memory = ct.StateType(ct.TensorType(shape=(1, 8, width), dtype=HALF), name="memory")
    inputs, outputs = [tensor("x", 1, 1, width)], [ct.TensorType(dtype=HALF)]
    report = judged(
        convert(Counter(width), inputs, torch.zeros(1, 1, width), outputs=outputs, states=[memory]), tmp_path
    )
    assert rules(report, "E") == grave
    assert not {"K4", "K5", "T5", "T8"} & rules(report, "W")  # a fixed slice of the state itself, written back


def test_an_image_and_a_depthwise_convolution(tmp_path: Path) -> None:
    inputs = [ct.ImageType(name="image", shape=(1, 3, 32, 64), scale=1 / 255)]
    model = convert(Pixels(), inputs, torch.zeros(1, 3, 32, 64), outputs=[ct.TensorType(dtype=HALF)])
    report = judged(model, tmp_path)
    # The converter scales an image in fp32 before it casts it: one product on the CPU, and nothing else.
    assert [f.op for f in report.findings if f.severity == "E"] == ["image__scaled__"]
    assert rules(report, "W") == {"O8"}
    assert len([f for f in report.findings if f.rule == "O8"]) == 1
    assert report.shares[0].clear_multiply_adds == report.shares[0].multiply_adds


def test_a_classic_network_beside_it(tmp_path: Path) -> None:
    maker: Callable[..., Any] = ct.models.neural_network.NeuralNetworkBuilder
    builder = maker([("x", ct.models.datatypes.Array(4))], [("y", ct.models.datatypes.Array(4))])
    builder.add_activation("relu", "RELU", "x", "y")
    ct.models.MLModel(builder.spec, skip_model_load=True).save(str(tmp_path / "classic.mlmodel"))
    report = judged(convert(Mlp(), [tensor("x", 1, 32, 64)], X, outputs=[ct.TensorType(dtype=HALF)]), tmp_path)
    folder = lint(tmp_path)
    assert folder.findings == report.findings
    assert folder.skipped == {"classic.mlmodel": "a model in the older form of one file"}
