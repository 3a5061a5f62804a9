"""A compute plan that was recorded on a Mac: which device each op was given. It overrules what was published."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anechain.bundle.program import Op
from anechain.errors import RequestError
from anechain.judge.lint_view import Package, View

DEVICES = ("NE", "GPU", "CPU")
NEURAL_ENGINE = "NE"


@dataclass(frozen=True)
class Placement:
    """Where one op was put, and its share of the function's cost, 0 to 1, if the plan says so."""

    device: str
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """package file -> function -> op -> Placement, as seen on `machine` with the system `os`."""

    machine: str
    os: str
    packages: Mapping[str, Mapping[str, Mapping[str, Placement]]]

    @property
    def where(self) -> str:
        return f"{self.machine}, {self.os}"

    def of(self, package: str, view: View, op: Op) -> Placement | None:
        named = self.packages.get(package, {}).get(view.name, {})
        return next((named[n] for n in _names(op) if n in named), None)

    def devices(self, package: str, view: View) -> set[str]:
        """The devices of all ops of a function that it names."""
        return {placed.device for placed in self.packages.get(package, {}).get(view.name, {}).values()}

    def engine_cost(self, package: str) -> float | None:
        """The share of the package's cost that went to the ANE, None where the plan has no costs for it."""
        places = [p for f in self.packages.get(package, {}).values() for p in f.values() if p.cost is not None]
        total = sum(p.cost or 0.0 for p in places)
        return sum(p.cost or 0.0 for p in places if p.device == NEURAL_ENGINE) / total if total else None


def _names(op: Op) -> Iterator[str]:
    yield op.name
    yield from (value.name for value in op.outputs)


def load_plan(path: Path, packages: list[Package]) -> Plan:
    """Reads a plan and checks that it is one of these packages.

    Raises RequestError, naming every offender, for a file that is no plan, and for names that the packages lack.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        plan = Plan(str(data["machine"]), str(data["os"]), {p: _package(f) for p, f in data["packages"].items()})
    except OSError as error:
        raise RequestError(f"--plan {path} cannot be read ({error.strerror}): check the path.") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(
            f"--plan {path} is not a compute plan ({type(error).__name__}: {error}): docs/lint.md shows the form."
        ) from None
    faults = _strangers(plan, {package.name: package for package in packages})
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise RequestError(f"--plan {path} is of other packages ({'; '.join(faults[:5])}{more}): record it again.")
    return plan


def _package(functions: Any) -> dict[str, dict[str, Placement]]:
    return {
        function: {op: _placement(op, placed) for op, placed in ops.items() if placed["device"] is not None}
        for function, ops in functions.items()
    }


def _placement(op: str, placed: Any) -> Placement:
    if placed["device"] not in DEVICES:
        raise ValueError(f"{op} is on {placed['device']!r}, which is none of {', '.join(DEVICES)}")
    cost = placed.get("cost")
    if cost is not None and not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"{op} has the cost {cost}, which is no share")
    return Placement(placed["device"], None if cost is None else float(cost))


def _strangers(plan: Plan, packages: Mapping[str, Package]) -> list[str]:
    faults = []
    for name, functions in plan.packages.items():
        if name not in packages:
            faults.append(f"there is no {name}")
            continue
        views = {view.name: view for view in packages[name].views}
        for function, ops in functions.items():
            if function not in views:
                faults.append(f"{name} has no function {function}")
                continue
            view = views[function]
            known = {n for op in view.all_ops for n in _names(op)} | set(view.consts)
            faults += [f"{name} has no op {op} in {function}" for op in ops if op not in known]
    return faults
