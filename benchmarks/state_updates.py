"""One state update a function against one update a layer: ports, ops, build time, and time of a reference decode step.

    python benchmarks/state_updates.py [--layers 15] [--context 1024]

Both programs are built from the same random weights of SmolLM2-135M's shape and must give the same hidden state.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake import graph, package
from anechain.bundle.form import Form
from anechain.bundle.program import read_program
from anechain.bundle.recipe import load_recipe
from anechain.bundle.spec import MASKED, STATE, Attention, ModelSpec, Port, Ports, Rope, layer_tensors, ports_of
from anechain.run.engine import Stage
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine

mb = graph.mb


def spec_of(layers: int) -> ModelSpec:
    attention = (Attention("full", Rope(100000.0)),)
    sizes = (49152, 576, layers, 9, 3, 64, 1536)
    return ModelSpec("llama", *sizes, 1e-5, attention, (0,) * layers, 0.125, 8192, tied=True)


def one_a_layer(spec: ModelSpec, recipe, weights, layers: range, context: int):  # type: ignore[no-untyped-def]
    """The other form: a begin/end pair, a slice update and a state update a layer, which then reads the result."""
    common = ports_of(spec, 1, context, layers)
    boxes = [Port(f"{edge}_{j}", (4,), "int32") for j in range(len(layers)) for edge in ("begin", "end")]
    ports = Ports((*common.inputs[:4], *boxes), common.outputs, common.state)

    class Updating(graph._Graph):
        inputs = value = None

        def attention(self, x, i, past_k, past_v, cos, sin, mask):  # type: ignore[no-untyped-def]
            n_kv, depth, group = spec.n_kv_heads, spec.head_dim, spec.n_heads // spec.n_kv_heads
            q = self.heads(self.linear(x, f"layers.{i}.q"), spec.n_heads, f"l{i}_q")
            k = self.heads(self.linear(x, f"layers.{i}.k"), n_kv, f"l{i}_k")
            v = self.heads(self.linear(x, f"layers.{i}.v"), n_kv, f"l{i}_v")
            q, k = self.rotate(q, cos, sin, f"l{i}_q"), self.rotate(k, cos, sin, f"l{i}_k")
            q = mb.reshape(x=mb.mul(x=q, y=np.float16(spec.attention_scale)), shape=[1, n_kv, group, depth])
            j = i - layers.start
            row = mb.slice_update(
                x=self.value,
                update=mb.concat(values=[k, v], axis=0),
                begin=self.inputs[f"begin_{j}"],
                end=self.inputs[f"end_{j}"],
            )
            Updating.value = mb.coreml_update_state(state=self.inputs[STATE], value=row)
            rows = {"x": Updating.value, "begin": [2 * j, 0, 0, 0], "size": [2, n_kv, context, depth]}
            both = mb.op("slice_by_size", rows, (2, n_kv, context, depth), "fp16", None)
            keys, values = mb.split(x=both, num_splits=2, axis=0)
            scores = mb.add(x=mb.matmul(x=q, y=keys, transpose_y=True), y=mask)
            mix = mb.matmul(x=mb.softmax(x=scores, axis=3), y=values)
            return self.linear(mb.reshape(x=mix, shape=[1, spec.n_heads * depth, 1, 1]), f"layers.{i}.o"), k, v

    def body(inputs):  # type: ignore[no-untyped-def]
        built = Updating(spec, recipe, 1, weights)
        Updating.inputs, Updating.value = inputs, mb.read_state(input=inputs[STATE])
        x = mb.transpose(x=inputs["hidden"], perm=[0, 3, 1, 2])
        for i in layers:
            x, _, _ = built.layer(x, i, None, None, inputs["cos"], inputs["sin"], inputs["mask"])
        return [built.port(mb.transpose(x=x, perm=[0, 2, 3, 1], name="rows"), "hidden_out")]

    return graph.Program({"decode": graph._function(ports, body)})


def step_ms(stage: Stage, inputs: dict[str, np.ndarray], past: np.ndarray, out: dict[str, np.ndarray]) -> float:
    """The median of seven decode steps, each on a state that holds `past`."""
    times = []
    for _ in range(7):
        state: Any = stage.new_state()
        state.packages[0][STATE] = past.copy()
        begun = time.perf_counter()
        stage.step("decode", inputs, state, out)
        times.append(time.perf_counter() - begun)
    return float(np.median(times) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    spec, recipe, layers = spec_of(options.layers), load_recipe("fp16"), range(options.layers)
    rng = np.random.default_rng(0)
    weights = {
        f"layers.{i}.{name}": (rng.standard_normal(s) / s[-1] ** 0.5 if len(s) > 1 else np.ones(s)).astype(np.float16)
        for i in layers
        for name, s in layer_tensors(spec).items()
    }
    position, results = 100, {}
    past = (rng.standard_normal((2 * options.layers, 3, options.context, 64)) * 0.5).astype(np.float16)
    for name in ("one update at the end", "one update a layer", "one blend at the end"):
        started = time.perf_counter()
        if name.endswith("end"):
            form = Form(state_update="blend" if "blend" in name else "slice")
            program = graph.block_program(spec, recipe, layers, options.context, 0, weights, form)
        else:
            program = one_a_layer(spec, recipe, weights, layers, options.context)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "block.mlpackage"
            package.save_package(program, path, {})
            build_s = time.perf_counter() - started
            function = read_program(path).functions["decode"]
            stage = ReferenceEngine().load([path])
            seen = position if name.endswith("end") else position + 1
            angle = position * 100000.0 ** -(np.arange(0, 64, 2) / 64)
            inputs = {
                "hidden": np.random.default_rng(1).standard_normal((1, 1, 1, 576)).astype(np.float16),
                "cos": np.cos(np.tile(angle, 2)).astype(np.float16)[None, None, None],
                "sin": np.sin(np.tile(angle, 2)).astype(np.float16)[None, None, None],
                "mask": np.where(np.arange(options.context) < seen, 0, MASKED).astype(np.float16)[None, None, None],
            }
            if name.endswith("end"):
                inputs["write"] = (np.arange(options.context) == position).astype(np.float16)[None, None, None]
                inputs |= {"begin": np.int32([0, 0, position, 0]), "end": np.int32([0, 0, position + 1, 0])}
            for j in layers:
                inputs[f"begin_{j}"] = np.int32([2 * j, 0, position, 0])
                inputs[f"end_{j}"] = np.int32([2 * j + 2, 3, position + 1, 64])
            out = {"hidden_out": np.zeros((1, 1, 1, 576), np.float16)}
            given = {p.name: inputs[p.name] for p in function.inputs}
            cpu = ""
            if name.endswith("end"):  # the cpu engine has no update of several axes whose place is an input
                cpu = (
                    f", cpu step {step_ms(CpuEngine('exact').load([path]), given, past.astype(np.float32), out):.1f} ms"
                )
            reference_ms = step_ms(stage, given, past, out)
        results[name] = out["hidden_out"].astype(np.float32).ravel()
        print(
            f"{name}: {len(function.inputs)} inputs, {len(function.ops)} ops, built and saved in {build_s:.2f} s, "
            f"reference step {reference_ms:.0f} ms{cpu}"
        )
    first, *others = results.values()
    differences = " and ".join(f"{np.abs(first - other).max():.4f}" for other in others)
    print(f"largest differences from the first {differences}, of a spread of {first.std():.3f}")


if __name__ == "__main__":
    main()
