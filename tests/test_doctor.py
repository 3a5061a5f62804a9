"""`anechain doctor`: what it says of this machine, and of machines that it is made to believe in."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.cli import doctor as module
from anechain.cli import main
from anechain.cli.bake import bake_bundle
from anechain.cli.doctor import examine
from anechain.errors import EngineError


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["anechain", "doctor", *words])
    with pytest.raises(SystemExit) as exit_code:
        main()
    return int(exit_code.value.code or 0), capsys.readouterr().out


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(capsys, monkeypatch, "--json")
    record = json.loads(text)
    assert code == 0 and record["can_bake"]
    assert record["python"] == {"version": platform.python_version(), "supported": True, "reason": ""}
    assert record["coremltools"]["version"] == "9.0"
    assert record["coremltools"]["native_parts"]["libmilstoragepython"]
    assert record["coremltools"]["native_parts"]["libmodelpackage"]
    assert record["engines"]["reference"]["available"] and record["engines"]["cpu"]["available"]
    assert record["memory_bytes"] > 2**28 and record["cores"] >= 1 and record["chip"]
    assert "palette-state-ct-9" in {p["id"] for p in record["known_problems"]}


def test_the_text_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(capsys, monkeypatch)
    assert code == 0
    for line in ("python       3.", "native part  libmodelpackage: found", "engine       openvino: yes, OpenVINO"):
        assert line in text
    assert text.endswith("can bake     yes\n")
    assert "published    palette-4bit-state: broken" in text


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from anechain.cli.doctor import examine; examine(); "
        "print(sorted({'coremltools', 'openvino', 'torch', 'numpy.testing'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Makes this look like a Mac, and examines it."""

    find = importlib.util.find_spec

    def look(
        version: str = "26.0.1", chip: str = "Apple M5 Pro", machine: str = "arm64", modules: tuple[str, ...] = ()
    ) -> Any:
        def pretend(name: str) -> Any:
            return object() if name in modules else None if name in HIDDEN else find(name)

        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), machine))
        monkeypatch.setattr(module, "_sysctl", {"kern.osproductversion": version, SYSCTL_CHIP: chip}.__getitem__)
        monkeypatch.setattr(importlib.util, "find_spec", pretend)
        return examine()

    return look


HIDDEN = ("CoreML",)
SYSCTL_CHIP = "machdep.cpu.brand_string"


def test_macos_26_does_not_pass_for_the_16_that_an_older_python_is_told(mac: Callable[..., dict[str, Any]]) -> None:
    """python/cpython issue 135675; where sysctl says nothing, what Python says is all there is."""
    assert mac("26.0.1")["system"].startswith("macOS 26.0.1, ")
    assert mac("")["system"].startswith("macOS 16.0, ")


def test_a_mac_and_the_problems_of_its_system(mac: Callable[..., dict[str, Any]]) -> None:
    record = mac()
    assert record["system"] == "macOS 26.0.1, M5 Pro" and record["chip"] == "Apple M5 Pro"
    found = {p["id"]: p for p in record["known_problems"]}
    there = {"long-slice-update-26.0.1", "unlike-states-26.0.1", "fused-attention-26", "native-parts-macos-26"}
    absent = {"cpu-prefill-ios-26.1", "palette-26.6.2", "bnns-26.4", "spec-9-macos", "target-26-bind-buffer"}
    assert there <= set(found) and not absent & set(found)
    assert all(p["status"] != "works" for p in found.values())
    assert "libcoremlpython" in record["coremltools"]["native_parts"]


def test_another_system_has_other_problems(mac: Callable[..., dict[str, Any]]) -> None:
    found = {p["id"] for p in mac("26.5", "Apple M4")["known_problems"]}
    assert {"bnns-26.4", "int8-channel-m4"} <= found
    assert "long-slice-update-26.0.1" not in found


@pytest.mark.parametrize(("machine", "modules", "reason"), [
    ("x86_64", HIDDEN, "which has no Neural Engine"),
    ("arm64", (), 'PyObjC is not installed: pip install "anechain[macos]"'),
])  # fmt: skip
def test_why_core_ml_is_not_there(
    machine: str, modules: tuple[str, ...], reason: str, mac: Callable[..., dict[str, Any]]
) -> None:
    engine = mac(machine=machine, modules=modules)["engines"]["coreml"]
    assert not engine["available"] and reason in engine["reason"]


def test_core_ml_where_all_is_there(mac: Callable[..., dict[str, Any]]) -> None:
    assert mac(modules=HIDDEN)["engines"]["coreml"] == {"available": True, "reason": "Core ML"}


@pytest.mark.skipif(platform.system() == "Darwin", reason="a Mac has it")
def test_core_ml_needs_a_mac() -> None:
    engine = examine()["engines"]["coreml"]
    assert not engine["available"] and "needs a Mac with Apple silicon; this is" in engine["reason"]


def test_native_parts_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel without them, as on a Python that coremltools was not built for."""
    (tmp_path / "coremltools").mkdir()
    (tmp_path / "coremltools/__init__.py").write_text("raise ImportError('this must not run')")
    (tmp_path / "coremltools/libmodelpackage.so").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "coremltools", raising=False)
    code, text = run(capsys, monkeypatch)
    assert code == 0
    assert "native part  libmilstoragepython: missing" in text
    assert "native part  libmodelpackage: found" in text
    assert "can bake     yes" in text


def test_without_coremltools_a_bake_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.startswith("_anechain_coreml_proto")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match="neither read nor written, because coremltools is not installed: pip"):
        bake_bundle("no-such-model", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert examine()["python"]["reason"] == "anechain needs Python 3.11 to 3.13"
    assert not examine()["can_bake"]


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_version", lambda package: "")
    record = examine()
    assert record["coremltools"]["version"] is None and not record["can_bake"]
    missing = {"available": False, "reason": "openvino is not installed: pip install openvino"}
    assert record["engines"]["openvino"] == missing
    monkeypatch.setattr(module, "_native_fault", lambda: "the native engine was not built")
    assert examine()["engines"]["cpu"] == missing | {"reason": f"{missing['reason']}; the native engine was not built"}
    monkeypatch.setattr(module, "_native_fault", lambda: "")
    assert examine()["engines"]["cpu"] == {"available": True, "reason": "native, AVX-512 VNNI"}
    assert record["known_problems"] == []
