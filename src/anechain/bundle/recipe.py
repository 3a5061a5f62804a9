"""Which matrix is stored how: a Recipe is an ordered list of rules over matrix names; the first that matches wins."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from anechain.bundle.spec import ModelSpec, matrices_of
from anechain.errors import RecipeError

Granularity = Literal["tensor", "channel", "block"]
Norm = Literal["max-scaled", "layer_norm"]
NORMS: tuple[Norm, ...] = ("max-scaled", "layer_norm")


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored.

    `bits` 16 means "as the program computes": fp16, or fp32 when the recipe's `compute` is fp32. 8 is linear symmetric
    int8 with one scale per output channel (`granularity` "channel"), or one per `block` inputs of a channel ("block").
    """

    bits: int
    granularity: Granularity = "channel"
    block: int = 0

    def __str__(self) -> str:
        if self.bits == 16:
            return "fp16"
        return f"int{self.bits}" + (f"-block{self.block}" if self.granularity == "block" else "")


FP16 = Scheme(16)


def parse_scheme(text: str) -> Scheme:
    """`fp16`, `int8` (one scale per output channel) or `int8-blockN` -> Scheme; raises RecipeError."""
    if text == "fp16":
        return FP16
    if text == "int8":
        return Scheme(8)
    head, _, block = text.partition("-block")
    if head == "int8" and block.isdigit() and int(block) > 0:
        return Scheme(8, "block", int(block))
    raise RecipeError(f"scheme {text!r} is not known: use fp16, int8 or int8-blockN, for example int8-block32.")


@dataclass(frozen=True)
class Rule:
    """Matrices whose canonical name matches `pattern` (shell style: `layers.*.down`, `head`) are stored as `scheme`."""

    pattern: str
    scheme: Scheme


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

    def scheme_for(self, matrix: str) -> Scheme:
        return next((r.scheme for r in self.rules if fnmatchcase(matrix, r.pattern)), FP16)

    def check(self, spec: ModelSpec) -> None:
        """Raises RecipeError, naming every offender, when a pattern matches nothing or a block does not divide."""
        matrices = matrices_of(spec)
        faults = [
            f"pattern {rule.pattern!r} matches no matrix"
            for rule in self.rules
            if not any(fnmatchcase(name, rule.pattern) for name in matrices)
        ]
        for name, (_, inputs) in matrices.items():
            scheme = self.scheme_for(name)
            if scheme.granularity == "block" and inputs % scheme.block:
                faults.append(f"{name} has {inputs} inputs, which blocks of {scheme.block} do not divide")
        if faults:
            raise RecipeError(f"recipe {self.name!r} cannot be applied to this model: {'; '.join(faults)}.")

    def to_json(self) -> dict[str, Any]:
        rules = [{"match": r.pattern, "scheme": str(r.scheme)} for r in self.rules]
        return {
            "name": self.name,
            "compute": self.compute,
            "layers_per_package": self.layers_per_package,
            "rules": rules,
            **({} if self.norm == NORMS[0] else {"norm": self.norm}),  # so that other recipes stay what they were
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Recipe":
        rules = tuple(Rule(r["match"], parse_scheme(r["scheme"])) for r in data["rules"])
        return Recipe(data["name"], data["compute"], rules, data["layers_per_package"], data.get("norm", NORMS[0]))


_TOP, _RULE = {"name", "compute", "layers_per_package", "norm", "rule"}, {"match", "scheme"}


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
    if per_package is not None and (
        not isinstance(per_package, int) or isinstance(per_package, bool) or per_package < 1
    ):
        faults.append(f"layers_per_package = {per_package!r} (use a whole number of at least 1)")
    rules = []
    entries = data.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        faults.append("`rule` is not a list of tables (write [[rule]])")
        entries = []
    for number, entry in enumerate(entries, 1):
        faults += [f"unknown key {key!r} in rule {number}" for key in sorted(set(entry) - _RULE)]
        faults += [f"rule {number} has no {key!r}" for key in sorted(_RULE - set(entry))]
        if set(entry) >= _RULE:
            try:
                rules.append(Rule(str(entry["match"]), parse_scheme(str(entry["scheme"]))))
            except RecipeError as error:
                faults.append(f"rule {number}: {str(error).rstrip('.')}")
    if faults:
        raise RecipeError(f"{where} cannot be used: {'; '.join(faults)}.")
    return Recipe(str(data.get("name", Path(where).stem)), compute, tuple(rules), per_package, norm)


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
