"""A suite: what is said before every request, the schema of the answers, how they are sampled, and the fixtures."""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from anechain.errors import RequestError
from anechain.judge.fixtures import Fixture, fixture_of, row_to_fixture
from anechain.run.sample import Sampling

SUITE, SCHEMA, FIXTURES, ROWS = "suite.toml", "schema.json", "fixtures", "fixtures.jsonl"
SPLITS = ("all", "gate", "trace")
MAX_TOKENS = 256  # of an answer, where a suite does not say
KEYS = ("name", "description", "system", "schema", "sampling", "checks")
SAMPLING = ("temperature", "top_k", "top_p", "seed", "max_tokens")


@dataclass(frozen=True)
class Suite:
    """`sha256` covers everything that decides an answer or its judgement: all of the fields here."""

    name: str
    path: Path
    system: str | None
    schema: Mapping[str, Any] | None
    sampling: Sampling
    max_tokens: int
    fixtures: tuple[Fixture, ...]
    sha256: str

    def of_split(self, split: str) -> tuple[Fixture, ...]:
        """The fixtures of "gate" or "trace", or "all". Raises RequestError for another, or when there are none."""
        if split not in SPLITS:
            raise RequestError(f"--split {split} is not known: use {', '.join(SPLITS)}.")
        chosen = tuple(f for f in self.fixtures if split == "all" or f.split == split)
        if not chosen:
            raise RequestError(f"the suite {self.name} has no fixture of the split {split}: use --split all.")
        return chosen


def shipped() -> list[str]:
    """The names of the suites that come with anechain."""
    return sorted(e.name for e in files("anechain").joinpath("suites").iterdir() if e.joinpath(SUITE).is_file())


def load_suite(ref: str) -> Suite:
    """A suite by the name of a shipped one, or from a folder or a `.jsonl` file. Raises RequestError."""
    path = Path(ref)
    if not path.exists() and ref in shipped():
        path = Path(str(files("anechain").joinpath("suites", ref)))
    if path.is_file() and path.suffix == ".jsonl":
        return _suite(path.stem, path, {}, None, _read(_rows(path), {}))
    if not (path / SUITE).is_file():
        raise RequestError(
            f"--suite {ref} is neither a folder with a {SUITE}, nor a .jsonl file, nor one of {', '.join(shipped())}."
        )
    settings = _toml(path / SUITE)
    common = settings.get("checks", {})
    schema = _schema(path / settings["schema"]) if isinstance(settings.get("schema"), str) else None
    folder, rows = sorted((path / FIXTURES).glob("*.toml")), path / ROWS
    if bool(folder) == rows.is_file():
        state = f"both {FIXTURES}/ and {ROWS}" if folder else f"neither {FIXTURES}/*.toml nor {ROWS}"
        raise RequestError(f"the suite {path} has {state}: give it one of them.")
    named = [(file.stem, file) for file in folder] or _rows(rows)
    fixtures = _read(named, common)
    return _suite(str(settings.get("name", path.name)), path, settings, schema, fixtures)


def _suite(
    name: str, path: Path, settings: Mapping[str, Any], schema: Mapping[str, Any] | None, fixtures: Sequence[Fixture]
) -> Suite:
    faults = [f"{key} is not a known key" for key in settings if key not in KEYS]
    sampling = settings.get("sampling", {})
    if not isinstance(sampling, dict):
        faults, sampling = [*faults, "sampling is not a table"], {}
    faults += [f"sampling.{key} is not a known key" for key in sampling if key not in SAMPLING]
    max_tokens = sampling.get("max_tokens", MAX_TOKENS)
    if type(max_tokens) is not int or max_tokens < 1:
        faults.append(f"sampling.max_tokens = {max_tokens!r} is not a whole number of at least 1")
    system = settings.get("system")
    if system is not None and not isinstance(system, str):
        faults.append("system is not a text")
    if sampling.get("temperature", 0) and sampling.get("seed") is None:
        faults.append("sampling.temperature is above 0 without a seed, so that no answer could be had again")
    names = [f.name for f in fixtures]
    faults += [f"there are several fixtures {n}" for n in sorted({n for n in names if names.count(n) > 1})]
    if faults:
        raise RequestError(f"the suite {path}: {'; '.join(faults)}; see docs/eval.md.")
    chosen = {key: value for key, value in sampling.items() if key != "max_tokens"}
    decided = json.dumps(
        {"system": system, "schema": schema, "sampling": sampling, "max_tokens": max_tokens}, sort_keys=True
    )
    digest = hashlib.sha256(decided.encode())
    for fixture in sorted(fixtures, key=lambda f: f.name):
        digest.update(repr(fixture).encode())
    return Suite(name, path, system, schema, Sampling(**chosen), max_tokens, tuple(fixtures), digest.hexdigest())


def _read(named: Sequence[tuple[str, Any]], common: Any) -> list[Fixture]:
    """Fixtures from (name, TOML file or plain data); raises RequestError with the faults of all of them."""
    fixtures, faults = [], []
    for name, content in named:
        try:
            fixtures.append(fixture_of(_toml(content) if isinstance(content, Path) else content, name, common))
        except RequestError as error:
            faults.append(str(error).removesuffix("; see docs/eval.md."))
    if faults:
        raise RequestError(f"{'; '.join(faults)}; see docs/eval.md.")
    return fixtures


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL file as fixtures' data, named after their lines; empty lines are passed over."""
    rows, faults = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise RequestError("it is no JSON object")
            rows.append((f"line-{number:04d}", row_to_fixture(row)))
        except (ValueError, RequestError) as error:
            faults.append(f"line {number}: {error}")
    if faults or not rows:
        raise RequestError(f"{path} cannot be read: {'; '.join(faults) or 'it has no rows'}; see docs/eval.md.")
    return rows


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read ({error}): correct it.") from None


def _schema(path: Path) -> Mapping[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(schema, dict):
            raise ValueError("it is no JSON object")
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        raise RequestError(f"the schema {path} cannot be used ({' '.join(str(error).split())[:200]}).") from None
    return schema
