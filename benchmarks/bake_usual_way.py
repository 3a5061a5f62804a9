"""One transformer block to a Core ML package, our way and the usual way, in turn: medians, and their ratio.

    python benchmarks/bake_usual_way.py [--repeats 5] [--context 1024] [--prefill 64]

The usual way: the block as a PyTorch module, traced, `ct.convert`, `linear_quantize_weights` (int8, per channel),
saved; twice and merged with `ct.utils.save_multifunction` where both functions are wanted, decode (one token) and
prefill. Ours: `make_block` from a safetensors file, the check of what was written included. Both get the same weights,
Qwen3-0.6B's shape with synthetic values, and give an int8 package with a state. The PyTorch modules lie ready, with
float32 weights in memory, and imports are not counted (they are printed). Seconds are of the processor, all threads.
Needs torch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import coremltools as ct
import coremltools.optimize as cto
import torch
from make_qwen3 import write_checkpoint

from anechain.bake import package
from anechain.bake.hf import HfSource
from anechain.bundle.program import read_program
from anechain.bundle.recipe import load_recipe
from anechain.bundle.spec import DECODE, PREFILL, ModelSpec

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
LAYER = 0


class Block(torch.nn.Module):
    """A Qwen3 layer as one writes it for Core ML: a state of keys and values, rotation and mask as inputs."""

    def __init__(self, source: HfSource, spec: ModelSpec, query: int, context: int) -> None:
        super().__init__()
        self.spec, self.query, self.context = spec, query, context
        for part in ("q", "k", "v", "o", "gate", "up", "down"):
            weight = torch.from_numpy(source.tensor(f"layers.{LAYER}.{part}").copy())
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            setattr(self, part, linear)
        for part in ("attn_norm", "ffn_norm", "q_norm", "k_norm"):
            gain = torch.from_numpy(source.tensor(f"layers.{LAYER}.{part}").copy())
            setattr(self, part, torch.nn.Parameter(gain, requires_grad=False))
        shape = (1, spec.n_kv_heads, context, spec.head_dim)
        self.register_buffer("keys", torch.zeros(shape, dtype=torch.float16))
        self.register_buffer("values", torch.zeros(shape, dtype=torch.float16))

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.rms_eps) * gain

    def forward(self, hidden, cos, sin, mask, write):  # type: ignore[no-untyped-def]
        """hidden [1, Q, H], cos and sin [1, 1, Q, D], mask [1, 1, Q, ctx], write [ctx, Q] of 0 and 1"""
        spec, query, depth = self.spec, self.query, self.spec.head_dim
        x = self.norm(hidden, self.attn_norm)
        q = self.q(x).view(1, query, spec.n_heads, depth).transpose(1, 2)  # [1, n, Q, D]
        k = self.k(x).view(1, query, spec.n_kv_heads, depth).transpose(1, 2)
        v = self.v(x).view(1, query, spec.n_kv_heads, depth).transpose(1, 2)
        q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        q, k = (t * cos + torch.cat((-t[..., depth // 2 :], t[..., : depth // 2]), dim=-1) * sin for t in (q, k))
        keep = 1 - write.sum(-1, keepdim=True)  # [ctx, 1]
        for state, new in ((self.keys, k), (self.values, v)):
            state.mul_(keep.half())
            state.add_(torch.matmul(write, new).half())
        group = spec.n_heads // spec.n_kv_heads
        keys = self.keys.float().repeat_interleave(group, dim=1)
        values = self.values.float().repeat_interleave(group, dim=1)
        scores = torch.matmul(q, keys.transpose(-1, -2)) * spec.attention_scale + mask
        mixed = torch.matmul(torch.softmax(scores, dim=-1), values)  # [1, n, Q, D]
        hidden = hidden + self.o(mixed.transpose(1, 2).reshape(1, query, spec.n_heads * depth))
        x = self.norm(hidden, self.ffn_norm)
        return hidden + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def usual_function(block: Block, path: Path) -> None:
    """Trace, convert, quantise, save."""
    spec, query, context = block.spec, block.query, block.context
    shapes = {
        "hidden": (1, query, spec.hidden_size), "cos": (1, 1, query, spec.head_dim),
        "sin": (1, 1, query, spec.head_dim), "mask": (1, 1, query, context), "write": (context, query),
    }  # fmt: skip
    traced = torch.jit.trace(block.eval(), tuple(torch.zeros(shape) for shape in shapes.values()))
    kv = (1, spec.n_kv_heads, context, spec.head_dim)
    model = ct.convert(
        traced,
        inputs=[ct.TensorType(name=name, shape=shape) for name, shape in shapes.items()],
        outputs=[ct.TensorType(name="hidden_out")],
        states=[ct.StateType(ct.TensorType(shape=kv), name=name) for name in ("keys", "values")],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    options = cto.coreml.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", granularity="per_channel")
    cto.coreml.linear_quantize_weights(model, cto.coreml.OptimizationConfig(global_config=options)).save(str(path))


def usual(blocks: dict[str, Block], folder: Path) -> Path:
    """All functions of `blocks` in one package."""
    if len(blocks) == 1:
        ((name, block),) = blocks.items()
        usual_function(block, folder / f"{name}.mlpackage")
        return folder / f"{name}.mlpackage"
    merged = ct.utils.MultiFunctionDescriptor()
    for name, block in blocks.items():
        usual_function(block, folder / f"{name}.mlpackage")
        merged.add_function(str(folder / f"{name}.mlpackage"), "main", name)
    merged.default_function_name = DECODE
    ct.utils.save_multifunction(merged, str(folder / "block.mlpackage"))
    return folder / "block.mlpackage"


def import_s(names: str) -> float:
    """Seconds of processor time of a fresh process that imports them, less those of one that imports nothing."""
    spent = []
    for statement in ("pass", f"import {names}"):
        code = f"import time\n{statement}\nprint(time.process_time())"
        spent.append(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout))
    return spent[1] - spent[0]


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("weight.bin"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    recipe = load_recipe("int8")
    with tempfile.TemporaryDirectory() as root:
        write_checkpoint(Path(root) / "model", layers=1, vocab=1024)
        source = HfSource(Path(root) / "model")
        queries = {DECODE: 1, PREFILL: options.prefill}
        ready = {name: Block(source, source.spec, query, options.context) for name, query in queries.items()}
        seconds: dict[str, list[float]] = {}
        for repeat in range(options.repeats + 1):  # the first time is not counted
            for case, names in (("one function", [DECODE]), ("two functions", [DECODE, PREFILL])):
                for side in ("usual", "ours"):
                    with tempfile.TemporaryDirectory(dir=root) as folder:
                        begun = time.process_time()
                        if side == "usual":
                            path = usual({name: ready[name] for name in names}, Path(folder))
                        else:
                            path = Path(folder) / "block.mlpackage"
                            prefill = options.prefill if PREFILL in names else 0
                            fresh = HfSource(Path(root) / "model")
                            package.make_block(
                                fresh, fresh.spec, recipe, range(LAYER, LAYER + 1), options.context, prefill, path
                            )
                        spent = time.process_time() - begun
                        program = read_program(path)
                        assert len(program.functions) == len(names) and 15e6 < weight_bytes(path) < 17e6, path
                        if repeat:
                            seconds.setdefault(f"{case}, {side}", []).append(spent)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    imports = {name: import_s(name) for name in ("torch, coremltools", "anechain.bake.package")}
    record = {"seconds": medians, "all": seconds, "import_s": imports, "repeats": options.repeats}
    record["ratio"] = {
        case: medians[f"{case}, usual"] / medians[f"{case}, ours"] for case in ("one function", "two functions")
    }
    if options.json:
        print(json.dumps(record))
        return
    print(f"median of {options.repeats}, seconds of processor time, one Qwen3-0.6B block, int8 per channel")
    for case, ratio in record["ratio"].items():
        print(f"{case:14} usual {medians[f'{case}, usual']:6.2f}  ours {medians[f'{case}, ours']:6.3f}  {ratio:5.1f}x")
    for name, spent in record["import_s"].items():
        print(f"not counted: importing {name}, {spent:.2f} s")


if __name__ == "__main__":
    main()
