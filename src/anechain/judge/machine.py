"""What a figure depends on besides the bundle: the machine, and the versions of what computes."""

import os
import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COMPUTES = ("anechain", "numpy", "openvino", "llguidance", "tokenizers", "jinja2")


@cache
def this_machine() -> dict[str, str | int]:
    """Architecture, processor, cores and system, as records keep them."""
    return {
        "architecture": architecture(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": platform.system(),
    }


def architecture() -> str:
    """ "x86-64" or "arm64", as verdicts print it."""
    name = platform.machine().lower()
    return {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}.get(name, name)


def tools() -> dict[str, str]:
    """The versions of the libraries that an answer passes through, "" for one that is not installed."""
    found = {}
    for name in _COMPUTES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return " ".join(found[1].split())
    return platform.processor() or platform.machine()
