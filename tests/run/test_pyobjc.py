"""Everything that run/coreml_port.py asks of PyObjC exists in the macOS wheels, with the arguments that it passes.

pyobjc_facts.json holds what the wheels say (pyobjc_wheels.py made it). PyObjC lists a selector only where it needs more
than the system tells it at run time; for the others, `elsewhere` names where the name was looked up.
"""

import ast
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anechain.run import coreml_port
from tests.run.pyobjc_wheels import FACTS, download, facts_of

TREE = ast.parse(Path(coreml_port.__file__).read_text(encoding="utf-8"))
FRAMEWORKS = ("CoreML", "CoreVideo", "Foundation", "IOSurface", "objc")
# Methods of Python's own objects that the port calls, and of the port itself.
PYTHON = {
    *("append", "as_buffer", "astype", "copyto", "dtype", "frombuffer", "items", "itemsize", "join"),
    *(
        "mac_ver",
        "machine",
        "ndarray",
        "partition",
        "prod",
        "rename",
        "reshape",
        "set",
        "system",
        "wait",
        "get",
        "Event",
    ),
    *("_plain", "autorelease_pool", "values"),
}


@dataclass
class Used:
    """Names of each framework; selector -> numbers of arguments of its calls; function -> the same."""

    members: dict[str, set[str]] = field(default_factory=dict)
    selectors: dict[str, set[int]] = field(default_factory=dict)
    functions: dict[str, set[int]] = field(default_factory=dict)
    unpacked: dict[str, int] = field(default_factory=dict)  # selector or function -> into how many names

    def names(self) -> dict[str, list[str]]:
        return {k: sorted(v) for k, v in self.members.items()} | {"selectors": sorted(self.selectors)}


def used_by_the_port() -> Used:
    used = Used()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FRAMEWORKS:
            used.members.setdefault(node.value.id, set()).add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            _call(used, node, node.func)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called, (target,) = node.value.func, node.targets
            if isinstance(called, ast.Attribute) and isinstance(target, ast.Tuple):
                used.unpacked[called.attr.replace("_", ":")] = len(target.elts)
    return used


def _call(used: Used, node: ast.Call, called: ast.Attribute) -> None:
    of_framework = isinstance(called.value, ast.Name) and called.value.id in FRAMEWORKS
    if of_framework:
        used.functions.setdefault(called.attr, set()).add(len(node.args))
    elif called.attr.endswith("_"):
        used.selectors.setdefault(called.attr.replace("_", ":"), set()).add(len(node.args))
    elif called.attr not in PYTHON and not node.args and not node.keywords:
        used.selectors.setdefault(called.attr, set()).add(0)


USED = used_by_the_port()
KNOWN: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}


MEMBERS = [(f, name) for f, names in sorted(USED.members.items()) for name in sorted(names)]


def test_the_walk_sees_the_port() -> None:
    assert {"MLModel", "MLComputePlan", "MLMultiArray"} <= USED.members["CoreML"]
    assert {"predictionFromFeatures:usingState:options:error:", "newState"} <= set(USED.selectors)
    assert USED.functions["CVPixelBufferCreate"] == {6}
    assert len(USED.selectors) > 30 and sum(map(len, USED.members.values())) > 30


@pytest.mark.parametrize(("framework", "name"), MEMBERS)
def test_classes_constants_and_functions(framework: str, name: str) -> None:
    about = KNOWN["names"].get(framework, {}).get(name)
    if about is None:
        assert f"{framework}.{name}" in KNOWN["elsewhere"]
        return
    calls = USED.functions.get(name)
    assert (calls is None) == ("arguments" not in about), "functions are called, and nothing else is"
    if calls is not None:
        assert calls == {about["arguments"]}
        assert USED.unpacked.get(name, 1) == 1 + len(about["out"])


@pytest.mark.parametrize("selector", sorted(USED.selectors))
def test_selectors(selector: str) -> None:
    assert USED.selectors[selector] == {selector.count(":")}
    about = KNOWN["selectors"].get(selector)
    if about is None:
        assert selector in KNOWN["elsewhere"]
        about = {"out": [], "block": {}}
    assert USED.unpacked.get(selector, 1) == 1 + len(about["out"]), "an error comes back beside the result"
    if selector.endswith("error:"):
        assert about["out"] == [selector.count(":") - 1]


def test_errors_are_handed_in_as_none() -> None:
    """What PyObjC asks for in the place of a result that comes back."""
    seen = 0
    for node in ast.walk(TREE):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("error_"):
            assert isinstance(node.args[-1], ast.Constant) and node.args[-1].value is None
            seen += 1
    assert seen == 6


def test_blocks_take_what_the_port_gives() -> None:
    """`completed` takes two values and the lambda of a state one."""
    load, visit = "loadContentsOfURL:configuration:completionHandler:", "getMultiArrayForStateNamed:handler:"
    assert KNOWN["selectors"][load]["block"] == {"2": 2} and KNOWN["selectors"][visit]["block"] == {"1": 1}
    functions = {n.name: len(n.args.args) for n in ast.walk(TREE) if isinstance(n, ast.FunctionDef)}
    assert functions["completed"] == 2
    (handler,) = (
        node.args[1]
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getMultiArrayForStateNamed_handler_"
    )
    assert isinstance(handler, ast.Lambda) and len(handler.args.args) == 1


def test_memory_of_unknown_length_is_taken_with_its_length() -> None:
    """What PyObjC gives as a list without an end: the port asks it for a number of bytes."""
    unknown = {n for names in KNOWN["names"].values() for n, a in names.items() if a and a.get("memory")}
    unknown |= {s for s, a in KNOWN["selectors"].items() if a["memory"]}
    assert unknown == {"CVPixelBufferGetBaseAddress", "IOSurfaceGetBaseAddress", "dataPointer"}
    taken = [
        node.func.value.func.attr
        for node in ast.walk(TREE)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "as_buffer"
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
        if isinstance(node.func.value.func, ast.Attribute)
    ]
    assert set(taken) == unknown and len(taken) == 4


def test_values_that_are_written_in_files_too() -> None:
    """Core ML's numbers of its types are those of the packages' own format."""
    values = {n: a["value"] for n, a in KNOWN["names"]["CoreML"].items() if a and "value" in a}
    assert values["MLMultiArrayDataTypeFloat16"] == 65552 and values["MLMultiArrayDataTypeInt32"] == 131104
    assert values["MLComputeUnitsCPUAndNeuralEngine"] == 3
    assert KNOWN["names"]["CoreVideo"]["kCVPixelFormatType_OneComponent16Half"] == {
        "value": int.from_bytes(b"L00h", "big")
    }


@pytest.mark.slow
def test_the_wheels_say_what_was_written_down(tmp_path: Path) -> None:
    try:
        wheels = download(tmp_path)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("no package registry is reachable from here")
    made = facts_of(wheels, USED.names())
    assert len(made["names"]) == 4
    assert made["names"] == KNOWN["names"] and made["selectors"] == KNOWN["selectors"]
