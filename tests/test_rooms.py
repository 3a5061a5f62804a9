"""The law of the rooms (docs/map.md): who imports whom, which heavy library lives where, how long a file gets.

Every import counts, wherever it stands: inside a function, under an `if`, for type checking only, relative, or as
`importlib.import_module("...")`.
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
MAX_LINES = 400

MAY_IMPORT = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "recipes": set(),  # TOML files, read as package data
    "suites": set(),  # TOML and JSON files, the same
    "bundle": {"errors"},
    "bake": {"errors", "bundle"},
    "run": {"errors", "bundle"},
    "judge": {"errors", "bundle", "bake", "run"},
    "serve": {"errors", "bundle", "run"},
    "cli": {"errors", "bundle", "bake", "run", "judge", "serve"},
}
FENCES = {
    "openvino": {"run/openvino.py"},
    "matplotlib": {"judge/plots.py"},
    "lm_eval": {"cli/harness.py"},
    **{name: set() for name in ("coremltools", "torch", "transformers", "peft", "scipy", "pytest", "hypothesis")},
}
PYOBJC = {"objc", "CoreML", "Quartz", "IOSurface", "Foundation", "PyObjCTools"}
PYOBJC_HOME = "run/coreml.py"
# It loads coremltools' generated protobuf modules under a name of its own, so that coremltools' __init__ never runs.
LOADS_BY_PATH = "bundle/mil_format.py"
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def module_name(path: Path, package: Path) -> str:
    parts = ("anechain", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(name: str, level: int, package: str) -> str:
    """What a relative import of `name` with `level` dots means inside `package`."""
    if not level:
        return name
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - level + 1], *([name] if name else [])])


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of every import; name is None for a whole module; module "?" cannot be read off the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in ("import_module", "__import__"):
                continue
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                bare = first.value.lstrip(".")
                yield node.lineno, absolute(bare, len(first.value) - len(bare), package), None
            else:
                yield node.lineno, "?", None


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    """Each ring of modules that import each other, once, as `a > b > a`."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            yield " > ".join([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                yield from visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        yield from visit(module, [])


def faults_of(repo: Path) -> list[str]:
    """Every breach of the law in the tree under `repo`, one line each."""
    package, faults = repo / "src/anechain", []
    pyobjc_files: set[str] = set()
    graph: dict[str, set[str]] = {}
    files = sorted(package.rglob("*.py"))
    modules = {module_name(path, package) for path in files}
    for path in files:
        where, name = path.relative_to(package).as_posix(), module_name(path, package)
        room = room_of(name) if path.parent != package else path.stem
        if room not in MAY_IMPORT:
            faults.append(f"{where}: {room!r} is not a room")
            continue
        inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
        edges = graph.setdefault(name, set())
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            faults.append(f"{where}:{error.lineno}: is not valid Python")
            continue
        for line, module, imported in imports_of(tree, inside):
            top = module.partition(".")[0]
            if module == "?" and where != LOADS_BY_PATH:
                faults.append(f"{where}:{line}: imports a module whose name cannot be read off the text")
            if where not in FENCES.get(top, {where}):
                faults.append(f"{where}:{line}: imports {top}")
            if top in PYOBJC:
                pyobjc_files.add(where)
            if top != "anechain":
                continue
            target = f"{module}.{imported}" if f"{module}.{imported}" in modules else module
            if target not in modules:
                faults.append(f"{where}:{line}: imports {target}, which is not there")
            if target != "anechain" and room_of(target) not in MAY_IMPORT[room] | {room}:
                faults.append(f"{where}:{line}: {room} imports {room_of(target)}")
            edges.add(target)
    for where in sorted(pyobjc_files):
        if not where.startswith("run/") or len(pyobjc_files | {PYOBJC_HOME}) > 2:
            faults.append(f"{where}: imports PyObjC, whose place is {PYOBJC_HOME} and one neighbour")
    faults += [f"cycle: {ring}" for ring in cycles(graph)]
    for path in [*files, *sorted((repo / "tests").rglob("*.py"))]:
        where = path.relative_to(repo).as_posix()
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines >= MAX_LINES:
            faults.append(f"{where}: {lines} lines")
        if vague := VAGUE & {*path.relative_to(repo).parts, path.stem}:
            faults.append(f"{where}: nothing is called {vague.pop()!r}")
    return faults


def test_the_tree_keeps_the_law() -> None:
    tree = ast.parse((REPO / "src/anechain/bundle/recipe.py").read_text(encoding="utf-8"))
    seen = {module for _, module, _ in imports_of(tree, "anechain.bundle")}
    assert {"anechain.bundle.spec", "anechain.errors"} <= seen, "the walk is blind"
    assert faults_of(REPO) == []


Tree = tuple[Path, set[str]]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy of the tree to plant into, and the faults that it has before anything is planted."""
    repo = tmp_path_factory.mktemp("tree")
    for where in ("src/anechain", "tests"):
        shutil.copytree(REPO / where, repo / where, ignore=shutil.ignore_patterns("__pycache__"))
    return repo, set(faults_of(repo))


def planted(tree: Tree, into: Path, *plants: tuple[str, str]) -> list[str]:
    """The faults that appear when each file of `plants` (path under src/anechain, content) is written into a copy."""
    repo, before = tree
    shutil.copytree(repo, into, dirs_exist_ok=True)
    for name, content in plants:
        target = into / "src/anechain" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    return [fault for fault in faults_of(into) if fault not in before]


PLANTS = {
    "upward import": ("run/planted.py", "import anechain.judge", "run imports judge"),
    "bake into run": ("bake/planted.py", "from anechain.run import engine", "bake imports run"),
    "run into bake": ("run/planted.py", "from anechain.bake.source import Source", "run imports bake"),
    "lazy": ("run/planted.py", "def f():\n    from anechain import bake", "run imports bake"),
    "under an if": ("bundle/planted.py", "if False:\n    import anechain.run.engine", "bundle imports run"),
    "for types only": (
        "bundle/planted.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from anechain.bake import source",
        "bundle imports bake",
    ),
    "relative": ("run/planted.py", "from ..bake import source", "run imports bake"),
    "relative, package": ("serve/__init__.py", "from ..judge import gate", "serve imports judge"),
    "import_module": (
        "judge/planted.py",
        "import importlib\nx = importlib.import_module('anechain.serve')",
        "judge imports serve",
    ),
    "import_module, relative": (
        "run/planted.py",
        "from importlib import import_module\nx = import_module('..bake.source', __package__)",
        "run imports bake",
    ),
    "import_module, computed": (
        "run/planted.py",
        "from importlib import import_module\nx = import_module('tor' + 'ch')",
        "cannot be read",
    ),
    "__import__": ("run/planted.py", "x = __import__('torch')", "imports torch"),
    "torch": ("bake/planted.py", "def f():\n    import torch.nn", "imports torch"),
    "transformers": ("judge/planted.py", "from transformers import AutoModel", "imports transformers"),
    "coremltools in run": ("run/planted.py", "import coremltools as ct", "imports coremltools"),
    "coremltools in the writer": ("bake/mil_file.py", "from coremltools import models", "imports coremltools"),
    "coremltools in the program reader": ("bundle/program.py", "import coremltools.proto", "imports coremltools"),
    "openvino": ("judge/planted.py", "import openvino", "imports openvino"),
    "PyObjC outside run": ("judge/planted.py", "import CoreML", "imports PyObjC"),
    "PyObjC in a third file": (
        "run/planted.py",
        "import Quartz",
        "run/planted.py: imports PyObjC",
        ("run/planted_too.py", "import objc"),
    ),
    "cycle": (
        "run/planted.py",
        "from anechain.run import planted_too",
        "cycle: anechain.run.planted > anechain.run.planted_too > anechain.run.planted",
        ("run/planted_too.py", "def f():\n    from anechain.run.planted import g"),
    ),
    "errors imports": ("errors.py", "from anechain.bundle.spec import Rope", "errors imports bundle"),
    "missing module": ("run/planted.py", "from anechain.bundle.nothing import x", "which is not there"),
    "unreadable": ("run/planted.py", "import", "run/planted.py:1: is not valid Python"),
    "new room": ("planted/__init__.py", "", "'planted' is not a room"),
    "vague file": ("run/utils.py", "", "nothing is called 'utils'"),
    "vague folder": ("run/common/planted.py", "", "nothing is called 'common'"),
    "long file": ("run/planted.py", "x = 1\n" * 400, ": 400 lines"),
    "long test": ("../../tests/test_planted.py", "x = 1\n" * 400, ": 400 lines"),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda name: name.replace(" ", "_"))
def test_a_planted_fault_is_found(plant: str, tree: Tree, tmp_path: Path) -> None:
    where, text, expected, *more = PLANTS[plant]
    found = planted(tree, tmp_path, (where, text), *more)
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("bundle/mil_format.py", "from importlib.util import find_spec\nx = find_spec('coremltools')"),
        ("run/openvino.py", "import openvino"),
        ("run/coreml.py", "import objc\nimport CoreML"),
        ("cli.py", "from anechain.judge import __name__\nfrom anechain.serve import __name__"),
        ("run/planted.py", "x = 1\n" * 399),
        ("run/planted.py", "from .engine import Stage\nfrom ..bundle.spec import Rope\nfrom anechain import errors"),
    ],
)
def test_what_the_law_allows_is_no_fault(where: str, text: str, tree: Tree, tmp_path: Path) -> None:
    assert planted(tree, tmp_path, (where, text)) == []


def test_pyobjc_has_one_neighbour(tmp_path: Path) -> None:
    run = tmp_path / "src/anechain/run"
    run.mkdir(parents=True)
    (run / "coreml.py").write_text("import CoreML", encoding="utf-8")
    (run / "planted.py").write_text("import Quartz", encoding="utf-8")
    assert faults_of(tmp_path) == []
