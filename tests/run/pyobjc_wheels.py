"""What PyObjC's macOS wheels say of what run/coreml_port.py uses: `python -m tests.run.pyobjc_wheels` writes FACTS.

A wheel's `_metadata.py` lists constants, functions with their types, and those selectors that need more than their
run-time signature: errors that are passed back by reference, blocks, memory of unknown length. The wheels are for
another system, so the files are read with a stand-in for `objc`, and nothing else of them is run.
"""

import json
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("pyobjc_facts.json")
WHEELS = {
    "pyobjc-framework-Cocoa": "Foundation",
    "pyobjc-framework-CoreML": "CoreML",
    "pyobjc-framework-IOSurface": "IOSurface",
    "pyobjc-framework-Quartz": "Quartz/CoreVideo",
}
PLATFORMS = ("macosx_10_13_universal2", "macosx_11_0_arm64")


def download(into: Path) -> list[Path]:
    """The newest wheels for Python 3.12 on Apple silicon. Raises subprocess.CalledProcessError without a registry."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ["--only-binary=:all:", "--no-deps", "--python-version", "3.12", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--retries", "0", "--timeout", "5", *options, *platforms]
    subprocess.run([*command, "-d", str(into), *WHEELS], check=True, capture_output=True, timeout=120)
    return sorted(into.glob("*.whl"))


def facts_of(wheels: list[Path], used: dict[str, list[str]]) -> dict[str, Any]:
    """What the wheels say of the names in `used`: framework -> names, and "selectors" -> selectors."""
    found: dict[str, Any] = {"wheels": {}, "names": {}, "selectors": {}}
    for wheel in wheels:
        name, version = re.match(r"pyobjc_framework_(\w+)-([^-]+)", wheel.name).groups()  # type: ignore[union-attr]
        package = next(p for n, p in WHEELS.items() if n.lower() == f"pyobjc-framework-{name.lower()}")
        found["wheels"][package] = version
        with zipfile.ZipFile(wheel) as archive:
            metadata = _Metadata(archive.read(f"{package}/_metadata.py").decode())
            metadata.classes |= set(re.findall(r'"((?:ML|NS)\w+)"', archive.read(f"{package}/__init__.py").decode()))
        framework = package.rpartition("/")[2]
        found["names"][framework] = {n: metadata.about(n) for n in used.get(framework, ())}
        for selector in used["selectors"]:
            if selector in metadata.selectors:
                found["selectors"].setdefault(selector, metadata.selectors[selector])
    return found


class _Metadata:
    """One `_metadata.py`, read."""

    def __init__(self, text: str) -> None:
        self.classes: set[str] = set()
        self.selectors: dict[str, dict[str, Any]] = {}
        stand_in = types.ModuleType("objc")
        stand_in.__dict__.update(
            arch="arm64", registerMetaDataForSelector=self._selector, _updatingMetadata=lambda on: None,
            registerNewKeywordsFromSelector=lambda c, s: self._selector(c.encode(), s, {}),
            registerNewKeywords=lambda c, words, s: self._selector(c.encode(), s.replace("_", ":").encode(), {}),
        )  # fmt: skip
        stand_in.__dict__["__getattr__"] = lambda name: (
            lambda *arguments, **options: None
        )  # whatever else is asked of it
        before = sys.modules.get("objc")
        sys.modules["objc"] = stand_in
        try:
            self._space: dict[str, Any] = {}
            exec(compile(text, "_metadata.py", "exec"), self._space)
        finally:
            del sys.modules["objc"]
            if before is not None:
                sys.modules["objc"] = before

    def _selector(self, of: bytes, selector: bytes, about: dict[str, Any]) -> None:
        self.classes.add(of.decode())
        out, block, memory = [], {}, ("retval" in about and "c_array_of_variable_length" in about["retval"])
        for number, argument in about.get("arguments", {}).items():
            if argument.get("type_modifier") in (b"o", "o"):
                out.append(number - 2)  # after the object and the selector
            if "callable" in argument:
                block[str(number - 2)] = len(argument["callable"]["arguments"]) - 1  # after the block itself
        facts = {"out": out, "block": block, "memory": memory}
        name = selector.decode()
        if any(facts.values()) or name not in self.selectors:
            self.selectors[name] = facts

    def about(self, name: str) -> dict[str, Any] | None:
        """{"class": True}, {"value": n}, {"constant": True}, or a function's number of arguments; None if unknown."""
        if found := re.search(rf"\${name}@(-?\d+)\$", str(self._space.get("enums", ""))):
            return {"value": int(found[1])}
        if re.search(rf"\${name}(@[^$]*)?\$", str(self._space.get("constants", ""))):
            return {"constant": True}
        if name in self._space.get("functions", {}):
            types_, *rest = self._space["functions"][name]
            about = rest[1] if len(rest) > 1 else {}
            out = [n for n, a in about.get("arguments", {}).items() if a.get("type_modifier") in (b"o", "o")]
            memory = "c_array_of_variable_length" in about.get("retval", {})
            return {"arguments": len(_parts(types_.decode())) - 1, "out": out, "memory": memory}
        return {"class": True} if name in self.classes else None


def _parts(encoding: str) -> list[str]:
    """The types of a function's result and arguments, out of their run-together encoding."""
    parts, i = [], 0
    while i < len(encoding):
        start = i
        while encoding[i] in "^rnNoORV":
            i += 1
        if encoding[i] in "{([":
            depth = 0
            while True:
                depth += (encoding[i] in "{([") - (encoding[i] in "})]")
                i += 1
                if depth == 0:
                    break
        else:
            i += 2 if encoding[i : i + 2] == "@?" else 1
        parts.append(encoding[start:i])
    return parts


if __name__ == "__main__":
    from tests.run.test_pyobjc import used_by_the_port

    kept = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {"elsewhere": {}}
    with tempfile.TemporaryDirectory() as folder:
        made = facts_of(download(Path(folder)), used_by_the_port().names())
    FACTS.write_text(json.dumps({**made, "elsewhere": kept["elsewhere"]}, indent=1, sort_keys=True) + "\n")
