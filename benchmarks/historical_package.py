"""Rebuilds the historical package: fp32 compute, RangeDim query and mask, one scale per 32 inputs, target macOS 26.

A decoder block traced from PyTorch with fp32 compute, a range of shapes for the query and the mask, int8 weights with
one scale per 32 inputs, and the deployment target macOS 26. Run it as

    python benchmarks/historical_package.py build/historical.mlpackage

and lint the folder that it writes: the four reasons are T1, S1, Q1 and V1.
"""

import argparse
import shutil
from pathlib import Path

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch
from torch import nn

REASONS = ("T1", "S1", "Q1", "V1")
QUERY, BLOCK = 64, 32


class Block(nn.Module):
    """Attention over a cache in a state, then a gated feed-forward, as the historical chain traced them."""

    def __init__(self, hidden: int, n_heads: int, n_kv: int, depth: int, ffn: int, context: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.depth = n_heads, n_kv, depth
        self.q, self.k, self.v = (nn.Linear(hidden, n * depth, bias=False) for n in (n_heads, n_kv, n_kv))
        self.o = nn.Linear(n_heads * depth, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(hidden)) for _ in range(2)])
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, n_kv, context, depth, dtype=torch.float16))

    @staticmethod
    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain

    def heads(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x.reshape(1, -1, n, self.depth).transpose(1, 2)  # [1, n, Q, D]

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden [1, Q, H], mask [1, 1, Q, end] -> [1, Q, H]; the last Q of the `end` positions are written."""
        end = mask.shape[-1]
        begin = end - hidden.shape[1]
        x = self.norm(hidden, self.norms[0])
        self.k_cache[:, :, begin:end, :] = self.heads(self.k(x), self.n_kv).half()
        self.v_cache[:, :, begin:end, :] = self.heads(self.v(x), self.n_kv).half()
        keys, values = self.k_cache[:, :, :end, :].float(), self.v_cache[:, :, :end, :].float()
        group = self.n_heads // self.n_kv
        mixed = []
        for i, query in enumerate(self.heads(self.q(x), self.n_heads).split(group, dim=1)):  # [1, G, Q, D]
            scores = query @ keys[:, i : i + 1].transpose(2, 3) * self.depth**-0.5 + mask  # [1, G, Q, end]
            mixed.append(scores.softmax(-1) @ values[:, i : i + 1])
        mix = torch.cat(mixed, 1).transpose(1, 2)  # [1, Q, n, D]
        hidden = hidden + self.o(mix.reshape(1, -1, self.n_heads * self.depth))
        x = self.norm(hidden, self.norms[1])
        return hidden + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def build(
    path: Path, hidden: int = 1024, n_heads: int = 16, n_kv: int = 8, depth: int = 128, ffn: int = 3072,
    context: int = 1024,
) -> Path:  # fmt: skip
    """Writes the package of one block, random weights, in Qwen3-0.6B's shape by default."""
    torch.manual_seed(0)
    block = Block(hidden, n_heads, n_kv, depth, ffn, context).eval()
    query = ct.RangeDim(1, QUERY, default=1)
    end = ct.RangeDim(1, context, default=1)
    with torch.no_grad():
        traced = torch.jit.trace(block, (torch.zeros(1, 2, hidden), torch.zeros(1, 1, 2, 5)))
    cache = ct.TensorType(shape=(1, n_kv, context, depth), dtype=np.float16)
    model = ct.convert(
        traced,
        inputs=[
            ct.TensorType("hidden", (1, query, hidden), np.float32),
            ct.TensorType("mask", (1, 1, query, end), np.float32),
        ],
        states=[ct.StateType(cache, "k_cache"), ct.StateType(cache, "v_cache")],
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.macOS26,
        skip_model_load=True,
    )
    per_block = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", granularity="per_block", block_size=BLOCK, weight_threshold=BLOCK**2
    )
    model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=per_block))
    shutil.rmtree(path, ignore_errors=True)
    model.save(str(path))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the .mlpackage to write")
    print(build(parser.parse_args().output))
