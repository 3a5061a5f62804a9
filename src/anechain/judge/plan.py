"""A compute plan of a bundle: where Core ML means to run each op, and which share of the cost is on the ANE."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anechain.bundle.manifest import Bundle
from anechain.bundle.program import read_program
from anechain.judge.lint_plan import NEURAL_ENGINE
from anechain.run.coreml import CoreMLEngine
from anechain.run.coreml_port import Placed

Places = Mapping[str, Mapping[str, Mapping[str, Placed]]]  # package file -> function -> op -> where


@dataclass(frozen=True)
class Planned:
    """`places` names only ops that the package has; `strange` counts those that Core ML named otherwise."""

    places: Places
    strange: int

    def to_json(self, machine: str, os: str) -> dict[str, Any]:
        """The form that `anechain lint --plan` reads."""
        packages = {
            file: {
                name: {op: {"device": p.device, "cost": p.cost} for op, p in ops.items()}
                for name, ops in functions.items()
            }
            for file, functions in self.places.items()
        }
        return {"machine": machine, "os": os, "packages": packages}

    def rows(self) -> list[tuple[str, str, dict[str, int], float | None]]:
        """(package, function, ops on each device, share of the cost on the ANE or None without costs)."""
        return [
            (file, name, _count(ops), engine_share(ops))
            for file, functions in self.places.items()
            for name, ops in functions.items()
        ]


def engine_share(ops: Mapping[str, Placed]) -> float | None:
    """Which share of the estimated cost of some ops is on the ANE; None where the plan has no costs."""
    costs = [(p.device, p.cost) for p in ops.values() if p.cost is not None]
    total = sum(cost for _, cost in costs)
    return sum(cost for device, cost in costs if device == NEURAL_ENGINE) / total if total else None


def make_plan(bundle: Bundle, engine: CoreMLEngine, progress: Callable[[int, int, str], None]) -> Planned:
    """Asks Core ML about every function of every package; raises EngineError with what it said."""
    places, strange = {}, 0
    paths = [*bundle.block_paths, bundle.head_path]
    for number, path in enumerate(paths):
        progress(number, len(paths), path.name)
        program = read_program(path)
        functions = {}
        for name, ops in engine.plan(path).items():
            function = program.functions[name]
            known = {n for op in function.ops for n in (op.name, *(v.name for v in op.outputs))} | set(function.consts)
            functions[name] = {op: placed for op, placed in ops.items() if op in known}
            strange += len(ops) - len(functions[name])
        places[path.name] = functions
    return Planned(places, strange)


def _count(ops: Mapping[str, Placed]) -> dict[str, int]:
    found: dict[str, int] = {}
    for placed in ops.values():
        found[placed.device] = found.get(placed.device, 0) + 1
    return found
