"""`anechain doctor`: what this machine can do."""

import importlib.util
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bake.native_parts import NATIVE, PYTHONS, native_parts, python_range
from anechain.cli.console import check_writable, err, out, print_json
from anechain.errors import EngineError, RequestError
from anechain.judge.compatibility import Known, Machine, chip_name, known_problems, parse_version
from anechain.judge.measured import Stored, feature_answer, import_record, stored_records
from anechain.run.native import library

MAC_NATIVE = "libcoremlpython"  # what predicts, and exists on a Mac only


def doctor(
    record_to: Annotated[
        Path | None,
        typer.Option("--record", metavar="OUT.zip", help="on a Mac: measure the demo model, for us to read"),
    ] = None,
    imported: Annotated[
        Path | None, typer.Option("--import", metavar="RECORD.zip", help="keep what was measured on a Mac")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Show what this machine can do, and which known problems concern it. Exit code 1 when it cannot even bake.

    With --record, measure the demo model on a Mac instead; with --import, take such a record into this user's store.
    """
    if record_to is not None and (imported is not None or as_json):
        raise RequestError("--record measures for hours and goes with no other option: leave --import and --json out.")
    if record_to is not None:
        return _measure(record_to)
    if imported is not None:
        _import(imported, as_json)
        return 0
    record = examine()
    if as_json:
        print_json(record)
    else:
        _show(record)
    return 0 if record["can_bake"] else 1


def _measure(path: Path) -> int:
    """Raises EngineError at once where there is no Core ML."""
    from anechain.judge.mac_record import Mac, make_record
    from anechain.judge.record import write_record
    from anechain.run.coreml import CoreMLEngine

    CoreMLEngine()
    check_writable(path, "--record")  # not after hours
    mac = Mac(mac_model()[1], chip_name(_chip()), _sysctl("hw.model"))
    write_record(make_record(mac, "demo", CoreMLEngine, err.print), path)
    err.print(f"{path}: no prompts, no serial numbers, no names; send it to us (docs/on-a-mac.md)")
    return 0


def examine() -> dict[str, Any]:
    """Everything that doctor prints; imports none of what it looks for."""
    machine, tool = this_machine(), _version("coremltools")
    python, records = _python(), stored_records()
    native = native_parts((*NATIVE, MAC_NATIVE) if platform.system() == "Darwin" else NATIVE)
    return {
        "python": python,
        "system": f"{platform.system()} {platform.release()}" if platform.system() != "Darwin" else str(machine),
        "architecture": platform.machine(),
        "chip": _chip(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "coremltools": {"version": tool or None, "native_parts": native},
        "engines": _engines(),
        "can_bake": python["supported"] and bool(tool),
        "known_problems": [_problem(row, machine, tool, records) for row in _concerning(machine, tool)],
        "records": len(records),
    }


def _import(path: Path, as_json: bool) -> None:
    stored, new = import_record(path)
    record = stored.record
    counts = {s: sum(t.status == s for t in record.trials) for s in ("works", "broken", "unknown")}
    summary = {"os": record.os, "chip": record.chip, "coremltools": record.coremltools, "new": new, **counts}
    if as_json:
        print_json({**summary, "file": str(stored.file)})
        return
    out.print(f"measured on {record.os}, {record.chip}, with packages of coremltools {record.coremltools}:")
    for trial in record.trials:
        tried = trial.configuration
        form = f"{tried.recipe}, {tried.target}, {tried.layers_per_package} layers a package, {tried.state_update}"
        form += f", {tried.activations} between packages" + (f", {tried.function}" if tried.function else "")
        out.print(f"{trial.status:8} {tried.model}: {form}" + (f": {trial.diverged}" if trial.diverged else ""))
    out.print(f"{'kept' if new else 'known already'}: {stored.file}")


def _python() -> dict[str, Any]:
    lowest, beyond = PYTHONS
    supported = lowest <= sys.version_info[:2] < beyond
    reason = "" if supported else f"anechain needs Python {python_range()}"
    return {"version": platform.python_version(), "supported": supported, "reason": reason}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _engines() -> dict[str, dict[str, Any]]:
    openvino = _version("openvino")
    other = f"OpenVINO {openvino}" if openvino else "openvino is not installed: pip install openvino"
    native = _native_fault()
    coreml = _coreml_fault()
    return {
        "reference": {"available": True, "reason": "numpy; slow, and the definition of right"},
        "cpu": {
            "available": bool(openvino) or not native,
            "reason": f"{other}; {native}" if native else "native, AVX-512 VNNI",
        },
        "openvino": {"available": bool(openvino), "reason": other},
        "coreml": {"available": not coreml, "reason": coreml or "Core ML"},
    }


def _native_fault() -> str:
    try:
        library()
    except EngineError as error:
        return str(error).rstrip(".")
    return ""


def _coreml_fault() -> str:
    if platform.system() != "Darwin":
        return f"needs a Mac with Apple silicon; this is {platform.system()} on {platform.machine()}"
    if platform.machine() != "arm64":
        return "this Python runs as x86-64 (Rosetta or an Intel Mac), which has no Neural Engine: use an arm64 Python"
    if importlib.util.find_spec("CoreML") is None:
        return 'PyObjC is not installed: pip install "anechain[macos]"'
    return ""


def this_machine() -> Machine:
    """What known problems are matched with: of a system that is not Apple's, nothing but its name."""
    if platform.system() != "Darwin":
        return Machine(platform.system(), (), "none")
    return Machine("macOS", parse_version(_macos()), chip_name(_chip()))


def mac_model() -> tuple[str, str]:
    """The kind of Mac with its chip, and its system: what a compute plan is headed by."""
    return f"{_sysctl('hw.model')} ({chip_name(_chip())})", f"macOS {_macos()}"


def _macos() -> str:
    """The system's own number: to a Python that was built for an earlier one macOS 26 says that it is 16
    (python/cpython issue 135675), and a record would speak of a system that does not exist."""
    return _sysctl("kern.osproductversion") or platform.mac_ver()[0]


def _chip() -> str:
    if platform.system() == "Darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _concerning(machine: Machine, tool: str) -> list[Known]:
    """The rows of this system, chip or coremltools in which something is broken or disputed."""
    here = [row for row in known_problems() if str(row.scope) and row.scope.holds(machine, tool) == "yes"]
    return [row for row in here if row.status != "works"]


def _problem(row: Known, machine: Machine, tool: str, records: list[Stored]) -> dict[str, Any]:
    judged = feature_answer(row.feature, machine, tool, records)
    return {
        "measured": judged.status if judged.basis == "measured" else None,
        "id": row.id, "feature": row.feature, "status": row.status, "where": str(row.scope), "rule": row.rule,
        "what": row.what, "fix": row.fix, "source": row.source,
    }  # fmt: skip


def _show(record: dict[str, Any]) -> None:
    python, tool = record["python"], record["coremltools"]
    memory = f", {record['memory_bytes'] / 2**30:.1f} GiB of memory" if record["memory_bytes"] else ""
    out.print(f"python       {python['version']} {python['reason'] or 'is supported'}")
    out.print(f"system       {record['system']}, {record['architecture']}")
    out.print(f"chip         {record['chip']}, {record['cores']} cores{memory}")
    out.print(f"coremltools  {tool['version'] or 'is not installed: pip install coremltools'}")
    for name, there in tool["native_parts"].items():
        out.print(f"native part  {name}: {'found' if there else 'missing from the wheel for this Python'}")
    for name, engine in record["engines"].items():
        out.print(f"engine       {name}: {'yes' if engine['available'] else 'no'}, {engine['reason']}")
    for problem in record["known_problems"]:
        what = f"{problem['what']} [{problem['where']}; {problem['source']}]"
        measured = f" (measured here: {problem['measured']})" if problem["measured"] else ""
        out.print(f"published    {problem['feature']}: {problem['status']}{measured}: {what}")
    if not record["known_problems"]:
        out.print("published    no known problem concerns this machine")
    out.print("can bake     " + ("yes" if record["can_bake"] else "no"))
