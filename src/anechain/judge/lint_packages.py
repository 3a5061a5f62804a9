"""Which packages there are to judge at a path: a bundle, one package, or a folder of any project's packages."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from anechain.bundle.manifest import MANIFEST, open_bundle
from anechain.bundle.program import NotAProgramError, read_program
from anechain.errors import BundleError, RequestError
from anechain.judge.lint_view import Package, Together

Progress = Callable[[int, int, str], None]  # done, all, what is being read

_VERSION = "com.github.apple.coremltools.version"  # where the converter writes its version in the metadata
_SKIPPED = {
    ".mlmodel": "a model in the older form of one file",
    ".mlmodelc": "compiled (lint the package that it came from)",
}


def silent(done: int, total: int, what: str) -> None:
    """A Progress that tells nobody."""


def load_packages(path: Path, report: Progress = silent) -> tuple[list[Package], dict[str, str]]:
    """The ML programs at `path`, and what else was met there; see `lint` for what is raised."""
    found, root, version = _places(path)
    together = Together()
    packages, skipped, faults = [], {}, []
    for number, place in enumerate(found):
        name = place.relative_to(root).as_posix()
        report(number, len(found), "packages")
        if place.suffix in _SKIPPED:
            skipped[name] = _SKIPPED[place.suffix]
            continue
        try:
            program = read_program(place)
        except NotAProgramError as error:
            skipped[name] = f"a {error.kind}, not an ML program"
        except BundleError as error:
            faults.append(str(error))
        else:
            size = sum(f.stat().st_size for f in place.rglob("*.bin"))
            packages.append(Package(name, program, size, program.metadata.get(_VERSION, version), together))
    if faults:
        raise BundleError(" ".join(faults))
    if not packages:
        what = "; ".join(f"{name} is {why}" for name, why in skipped.items()) or "no .mlpackage is in it"
        raise RequestError(f"there is no ML program to lint at {path} ({what}): name a .mlpackage or a folder of them.")
    for package in packages:
        matrices = {tuple(w.parts): w for view in package.views for _, _, w in view.matrices}
        together.weights += sum(math.prod(w.shape) for w in matrices.values())
        together.compressed |= any(w.form != "plain" for w in matrices.values())
    return packages, skipped


def _places(path: Path) -> tuple[list[Path], Path, str]:
    """What there may be to read at `path`, the folder that names are relative to, and the coremltools that wrote it."""
    if not path.exists():
        raise RequestError(f"{path} is not there: check the path.")
    if path.is_file() and path.suffix not in (".mlpackage", *_SKIPPED):
        raise RequestError(f"{path} is a file and no model: name a .mlpackage, a bundle or a folder of packages.")
    if path.suffix == ".mlpackage" or path.is_file():
        return [path], path.parent, ""
    if _is_bundle(path):
        bundle = open_bundle(path)
        return [*bundle.block_paths, bundle.head_path], path, str(bundle.tools.get("coremltools", ""))
    kinds = (".mlpackage", *_SKIPPED)
    inside = {p for p in path.rglob("*") if p.suffix in kinds}
    return sorted(p for p in inside if not any(parent in inside for parent in p.parents)), path, ""


def _is_bundle(path: Path) -> bool:
    """Whether the folder has a manifest of ours, be it damaged; another project's manifest.json says nothing."""
    try:
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return isinstance(data, dict) and "blocks" in data
