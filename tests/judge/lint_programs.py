"""Small packages for the rules of lint, and what the rules say of them: `from tests.judge.lint_programs import expect`.

`expect(package, "T1", {"bad"}, near={"good"})` asserts that the rule is found at exactly the ops or features of the
first set, and that those of the second are there and go free.
"""

import functools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from anechain.judge.compatibility import Machine
from anechain.judge.lint import Finding, lint
from anechain.judge.lint_packages import load_packages
from tests.bundle.packages import save

HALF, WIDE, INT, BOOL = types.fp16, types.fp32, types.int32, types.bool
NOBODY: frozenset[str] = frozenset()
ANY = Machine()


@dataclass(frozen=True)
class Spec:
    """A tensor that a test's program takes."""

    shape: tuple[int, ...]
    dtype: Any = HALF
    state: bool = False


def build(path: Path, body: Callable[..., Any], *specs: Spec, target: Any = ct.target.iOS18) -> Path:
    """Writes the package of one function whose inputs are the parameters of `body`, in the order of `specs`."""
    made = [mb.StateTensorSpec(s.shape, s.dtype) if s.state else mb.TensorSpec(s.shape, s.dtype) for s in specs]
    return save(mb.program(input_specs=made, opset_version=target)(body), path, target)


@functools.cache
def findings(package: Path, machine: Machine = ANY) -> tuple[Finding, ...]:
    """Judged once: the tests of a file share their packages."""
    return lint(package, machine).findings


@functools.cache
def _names(path: Path) -> frozenset[str]:
    packages, _ = load_packages(path)
    views = [view for package in packages for view in package.views]
    return frozenset(
        n
        for v in views
        for n in (v.name, *(op.name for op in v.all_ops), *(x.name for x in (*v.function.outputs, *v.values.values())))
    )


def expect(
    package: Path, rule: str, hits: Collection[str | None], near: Collection[str] = NOBODY, severity: str = "",
    machine: Machine = ANY,
) -> list[Finding]:  # fmt: skip
    """Asserts where a rule (with `severity`, if one is named) is found; returns its findings."""
    found = [f for f in findings(package, machine) if f.rule == rule and f.severity in (severity or f.severity)]
    assert {f.op for f in found} == set(hits), f"{rule} is found at {sorted(map(str, (f.op for f in found)))}"
    assert set(near) <= _names(package), f"not in the program: {set(near) - _names(package)}"
    assert not set(near) & set(hits)
    return found


def half(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


PRODUCTS = {"in_blocks": 64 * 64 * 32, "plain": 128 * 64 * 32, "square": 32 * 32 * 128, "in_fp32": 32 * 32 * 16}
WEIGHTS = {"in_blocks": 64 * 64 + 64 * 2 * 2, "plain": 128 * 64 * 2, "in_fp32": 32 * 16 * 4}


def products(folder: Path) -> Path:
    """one.mlpackage: PRODUCTS of known size, one of a weight in blocks, one in fp32, two that nothing is said against.

    WEIGHTS are the bytes of those that have one.
    """

    def body(x: Any, ids: Any) -> Any:
        data, scale = np.ones((64, 64, 1, 1), np.int8), np.full((64, 2, 1, 1), 0.1, np.float16)
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="blocked")
        y = mb.conv(x=x, weight=weight, pad_type="valid", name="in_blocks")
        y = mb.conv(x=y, weight=half(128, 64, 1, 1), pad_type="valid", name="plain")
        rows = mb.reshape(x=y, shape=[128, 32], name="rows")
        y = mb.matmul(x=rows, y=rows, transpose_x=True, name="square")
        wide = mb.matmul(x=mb.cast(x=y, dtype="fp32", name="up"), y=np.ones((32, 16), np.float32), name="in_fp32")
        return wide, mb.add(x=ids, y=np.int32(1), name="later")

    return build(folder / "one.mlpackage", body, Spec((1, 64, 1, 32)), Spec((4,), INT))


def ranged(model: Any) -> None:
    """An edit: the input `x` of `products` gets a range of shapes."""
    array = next(i for i in model.description.input if i.name == "x").type.multiArrayType
    for low, high in ((1, 1), (64, 64), (1, 1), (1, 32)):
        array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


def planned(tmp_path: Path, ops: dict[str, Any], package: str = "one.mlpackage", function: str = "main") -> Path:
    """The file of a plan: op -> device, or op -> all that the plan says of it."""
    path = tmp_path / "plan.json"
    places = {op: p if isinstance(p, dict) else {"device": p} for op, p in ops.items()}
    record = {"machine": "Mac16,9", "os": "macOS 15.5", "packages": {package: {function: places}}}
    path.write_text(json.dumps(record))
    return path
