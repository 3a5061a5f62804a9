"""The native libraries of coremltools: no bake needs them, but converting anything else does, so doctor looks."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ((3, 11), (3, 14))  # for which coremltools has wheels with them: from, and before which
NATIVE = ("libmilstoragepython", "libmodelpackage")  # what writes weights, and packages
_SUFFIXES = (".so", ".dylib", ".pyd")


def python_range() -> str:
    lowest, beyond = PYTHONS
    return f"{lowest[0]}.{lowest[1]} to {beyond[0]}.{beyond[1] - 1}"


def native_parts(names: Sequence[str] = NATIVE) -> dict[str, bool]:
    """Which of them lie in the folder of coremltools; importing it would take seconds and say less."""
    spec = importlib.util.find_spec("coremltools")
    places = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    return {name: any(p.suffix in _SUFFIXES for place in places for p in place.glob(f"{name}*")) for name in names}
