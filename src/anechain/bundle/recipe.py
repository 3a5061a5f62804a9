"""Which matrix is stored how: a Recipe is an ordered list of rules over matrices; the first that matches wins."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from anechain.bundle.spec import ModelSpec, head_pieces, matrices_of
from anechain.errors import RecipeError

Kind = Literal["linear", "palette"]
Granularity = Literal["tensor", "channel", "block", "group"]
Norm = Literal["max-scaled", "layer_norm"]
NORMS: tuple[Norm, ...] = ("max-scaled", "layer_norm")


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored.

    `bits` 16 means "as the program computes": fp16, or fp32 when the recipe's `compute` is fp32. `kind` "linear" is
    whole steps, int8 or int4 and symmetric, with one scale per output channel (`granularity` "channel") or one per
    `block` inputs of a channel ("block"). "palette" is places of 8, 6 or 4 bits in a table, one table for the matrix
    ("tensor") or for every `block` output channels ("group"). With a `rank`, a product of two fp16 matrices of so many
    inner channels is added to what was rounded.
    """

    bits: int
    granularity: Granularity = "channel"
    block: int = 0
    kind: Kind = "linear"
    rank: int = 0

    def __str__(self) -> str:
        if self.bits == 16:
            return "fp16"
        name = f"{'int' if self.kind == 'linear' else 'palette'}{self.bits}"
        part = f"-{self.granularity}{self.block}" if self.granularity in ("block", "group") else ""
        return name + part + (f"+rank{self.rank}" if self.rank else "")


FP16 = Scheme(16)
_SCHEME = re.compile(
    r"(?:(?P<int>int[84])(?:-block(?P<block>[1-9]\d*))?|(?P<palette>palette[864])(?:-group(?P<group>[1-9]\d*))?)"
    r"(?:\+rank(?P<rank>[1-9]\d*))?"
)


def parse_scheme(text: str) -> Scheme:
    """`fp16`, `int8`, `int4-block32`, `palette6-group16`, `int8+rank16` ... -> Scheme; raises RecipeError."""
    if text == "fp16":
        return FP16
    found = _SCHEME.fullmatch(text)
    if found is None:
        raise RecipeError(
            f"scheme {text!r} is not known: use fp16, int8 or int4 (with -blockN: one scale for N inputs), palette8, "
            "palette6 or palette4 (with -groupN: one table for N outputs), each but fp16 with +rankN if you like."
        )
    rank = int(found["rank"] or 0)
    if found["int"]:
        bits, block = int(found["int"][-1]), found["block"]
        return Scheme(bits, "block" if block else "channel", int(block or 0), rank=rank)
    bits, group = int(found["palette"][-1]), found["group"]
    return Scheme(bits, "group" if group else "tensor", int(group or 0), "palette", rank)


@dataclass(frozen=True)
class Rule:
    """Matrices whose canonical name matches `pattern` (shell style: `layers.*.down`, `head`) are stored as `scheme`.

    Only those of the `layers` named, if any are, with at least `at_least` and, if that is not 0, at most `at_most`
    weights.
    """

    pattern: str
    scheme: Scheme
    layers: tuple[int, ...] = ()
    at_least: int = 0
    at_most: int = 0

    def matches(self, matrix: str, weights: int) -> bool:
        parts = matrix.split(".")
        return (
            fnmatchcase(matrix, self.pattern)
            and (not self.layers or (parts[0] == "layers" and int(parts[1]) in self.layers))
            and self.at_least <= weights <= (self.at_most or weights)
        )

    def __str__(self) -> str:
        """How it is named in an error."""
        limits = [f"layers {', '.join(map(str, self.layers))}"] if self.layers else []
        limits += [f"at_least {self.at_least}"] if self.at_least else []
        limits += [f"at_most {self.at_most}"] if self.at_most else []
        return f"pattern {self.pattern!r}" + (f" ({'; '.join(limits)})" if limits else "")

    def to_json(self) -> dict[str, Any]:
        data = {"match": self.pattern, "scheme": str(self.scheme)}
        limits = {"layers": list(self.layers), "at_least": self.at_least, "at_most": self.at_most}
        return data | {key: value for key, value in limits.items() if value}


METHODS = ("clip", "scales", "gptq", "drift", "level", "weigh")


@dataclass(frozen=True)
class Calibration:
    """How rounding is made to cost less: the methods, and the text that they look at. docs/quantization.md has more.

    `sequences` texts of `length` tokens are what the model itself says, drawn with `seed`; the project's own text is
    always there as well.
    """

    methods: tuple[str, ...]
    sequences: int = 40
    length: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules. A matrix that no rule matches stays fp16.

    `norm` is how an RMSNorm is written: scaled by the row's maximum, or as a layer_norm of [x, -x]. The second is there
    to be compared on a Mac: with fp16 inside the op, |x| > 255 overflows (docs/decisions/0019-the-other-norm.md).
    """

    name: str
    compute: Literal["fp16", "fp32"]
    rules: tuple[Rule, ...]
    layers_per_package: int | None = None  # the recipe's own wish; the command line's flag wins
    norm: Norm = "max-scaled"
    calibration: Calibration | None = None

    def scheme_for(self, matrix: str, weights: int) -> Scheme:
        """The scheme of a matrix by its canonical name and its number of weights."""
        return next((r.scheme for r in self.rules if r.matches(matrix, weights)), FP16)

    def check(self, spec: ModelSpec) -> None:
        """Raises RecipeError, naming every offender, when a rule matches nothing or blocks or groups do not divide."""
        matrices = matrices_of(spec)
        faults = [
            f"{rule} matches no matrix"
            for rule in self.rules
            if not any(rule.matches(name, o * i) for name, (o, i) in matrices.items())
        ]
        for name, (outputs, inputs) in matrices.items():
            scheme = self.scheme_for(name, outputs * inputs)
            rows = head_pieces(spec)[1] if name == "head" else outputs
            if scheme.granularity == "block" and inputs % scheme.block:
                faults.append(f"{name} has {inputs} inputs, which blocks of {scheme.block} do not divide")
            if scheme.granularity == "group" and rows % scheme.block:
                faults.append(f"{name} has {rows} outputs, which groups of {scheme.block} do not divide")
            if scheme.rank >= min(rows, inputs):
                faults.append(f"{name} is {rows} x {inputs}, too small for a correction of rank {scheme.rank}")
            if name == "embed" and (scheme.rank or scheme.bits < 8):
                faults.append(f"{name} is looked up row by row and cannot be {scheme} (use fp16, int8 or palette8)")
        if self.calibration is not None and self.compute != "fp16":
            faults.append('calibration needs compute = "fp16"')
        if faults:
            raise RecipeError(f"recipe {self.name!r} cannot be applied to this model: {'; '.join(faults)}.")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "compute": self.compute,
            "layers_per_package": self.layers_per_package,
            "rules": [rule.to_json() for rule in self.rules],
            **({} if self.norm == NORMS[0] else {"norm": self.norm}),  # so that other recipes stay what they were
            **({"calibration": asdict(self.calibration)} if self.calibration else {}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Recipe":
        rules = tuple(
            Rule(
                r["match"], parse_scheme(r["scheme"]), tuple(r.get("layers", ())), r.get("at_least", 0),
                r.get("at_most", 0),
            )
            for r in data["rules"]
        )  # fmt: skip
        kept = data.get("calibration")
        calibration = Calibration(**{**kept, "methods": tuple(kept["methods"])}) if kept else None
        norm = data.get("norm", NORMS[0])
        return Recipe(data["name"], data["compute"], rules, data["layers_per_package"], norm, calibration)


_TOP = {"name", "compute", "layers_per_package", "norm", "rule", "calibration", "experimental"}
_NEEDED, _LIMITS = {"match", "scheme"}, {"layers", "at_least", "at_most"}
_COUNTS = {"sequences": 0, "length": 2, "seed": 0}  # the least that each may be


def parse_recipe(text: str, where: str) -> Recipe:
    """TOML text -> Recipe. Unknown keys and values are a RecipeError that lists all of them; `where` names the file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not valid TOML ({error}): correct that line.") from None
    faults = [f"unknown key {key!r}" for key in sorted(set(data) - _TOP)]
    compute = data.get("compute", "fp16")
    if compute not in ("fp16", "fp32"):
        faults.append(f'compute = {compute!r} (use "fp16" or "fp32")')
    norm = data.get("norm", NORMS[0])
    if norm not in NORMS:
        faults.append(f"norm = {norm!r} (use {' or '.join(map(repr, NORMS))})")
    per_package = data.get("layers_per_package")
    if per_package is not None and not _whole(per_package, 1):
        faults.append(f"layers_per_package = {per_package!r} (use a whole number of at least 1)")
    rules = []
    entries = data.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        faults.append("`rule` is not a list of tables (write [[rule]])")
        entries = []
    for number, entry in enumerate(entries, 1):
        rules += _rules(entry, number, faults)
    calibration = _calibration(data["calibration"], faults) if "calibration" in data else None
    experimental = data.get("experimental", False)
    if not isinstance(experimental, bool):
        faults.append(f"experimental = {experimental!r} (use true or false)")
    fragile = sorted({str(r.scheme) for r in rules if r.scheme.kind == "palette" and r.scheme.bits == 4})
    if fragile and experimental is False:
        # coremltools issues 2688 and 2716: wrong answers, or a crash after about a hundred calls, next to a state.
        faults.append(f"{', '.join(fragile)} is reported to fail on Macs beside a state (use experimental = true)")
    if faults:
        raise RecipeError(f"{where} cannot be used: {'; '.join(faults)}.")
    return Recipe(str(data.get("name", Path(where).stem)), compute, tuple(rules), per_package, norm, calibration)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _rules(entry: Mapping[str, Any], number: int, faults: list[str]) -> list[Rule]:
    """One [[rule]]: a Rule for each of its patterns. What is wrong with it goes to `faults`."""
    before = len(faults)
    faults += [f"unknown key {key!r} in rule {number}" for key in sorted(set(entry) - _NEEDED - _LIMITS)]
    faults += [f"rule {number} has no {key!r}" for key in sorted(_NEEDED - set(entry))]
    patterns = entry.get("match", "")
    patterns = patterns if isinstance(patterns, list) else [patterns]
    if not patterns or not all(isinstance(p, str) for p in patterns):
        faults.append(f"match = {entry.get('match')!r} in rule {number} (use a pattern or a list of patterns)")
    layers = entry.get("layers", [])
    if not isinstance(layers, list) or not all(_whole(n, 0) for n in layers):
        faults.append(f"layers = {layers!r} in rule {number} (use a list of whole numbers, the first layer is 0)")
    limits = {key: entry.get(key, 0) for key in ("at_least", "at_most")}
    for key, value in limits.items():
        if not _whole(value, 0):
            faults.append(f"{key} = {value!r} in rule {number} (use a whole number of weights)")
    if "scheme" in entry:
        try:
            scheme = parse_scheme(str(entry["scheme"]))
        except RecipeError as error:
            faults.append(f"rule {number}: {str(error).rstrip('.')}")
    if len(faults) > before:
        return []
    return [Rule(pattern, scheme, tuple(layers), **limits) for pattern in patterns]


def _calibration(entry: Any, faults: list[str]) -> Calibration | None:
    """The table [calibration]. What is wrong with it goes to `faults`."""
    if not isinstance(entry, dict):
        faults.append("`calibration` is not a table (write [calibration])")
        return None
    faults += [f"unknown key {key!r} in calibration" for key in sorted(set(entry) - {"methods", *_COUNTS})]
    methods = entry.get("methods")
    if not isinstance(methods, list) or not methods or not set(map(str, methods)) <= set(METHODS):
        faults.append(f"methods = {methods!r} in calibration (use a list of {', '.join(METHODS)})")
    counts = {key: entry[key] for key in _COUNTS if key in entry}
    for key, value in counts.items():
        if not _whole(value, _COUNTS[key]):
            faults.append(f"{key} = {value!r} in calibration (use a whole number of at least {_COUNTS[key]})")
    return None if faults else Calibration(tuple(m for m in METHODS if m in entry["methods"]), **counts)


def load_recipe(ref: str) -> Recipe:
    """A recipe by name (one of those that come with anechain) or by the path of a TOML file; raises RecipeError."""
    path = Path(ref)
    if path.suffix == ".toml":
        try:
            return parse_recipe(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {ref} cannot be read ({error}): check the path.") from None
    shipped = resources.files("anechain.recipes")
    known = sorted(p.name.removesuffix(".toml") for p in shipped.iterdir() if p.name.endswith(".toml"))
    if ref not in known:
        raise RecipeError(f"recipe {ref!r} is not known: use one of {', '.join(known)}, or the path of a .toml file.")
    return parse_recipe((shipped / f"{ref}.toml").read_text(encoding="utf-8"), f"{ref}.toml")
