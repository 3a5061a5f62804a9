"""Whether an adapter fits a model, tensor by tensor, and what it makes of which of the model's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from anechain.bake.adapter import Adapter, Module
from anechain.bake.family import FAMILIES
from anechain.bake.names import Names, folded
from anechain.bake.safetensors_file import FLOATS
from anechain.bake.source import Source
from anechain.bake.wrapper import WRAPPERS
from anechain.bundle.spec import LAYER_MATRICES, tensors_of
from anechain.errors import SourceError

_ENDS = ("embed", "head")


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor; the strings are keys of the adapter's file.

    `replaced` takes the tensor's place; then `scale` times the product of `b` and `a` is added (or of their transposes
    for an `embedding`), or `scale` times `bias`; then DoRA's `magnitude` sets the length of each output (of each input
    of an `embedding`).
    """

    replaced: str | None = None
    a: str | None = None
    b: str | None = None
    bias: str | None = None
    magnitude: str | None = None
    embedding: bool = False
    scale: float = 1.0
    rank: int = 0


@dataclass(frozen=True)
class Fit:
    """`changes` is by canonical name; a tied model that stays tied has no `head` among them."""

    changes: Mapping[str, Change]
    vocab_size: int
    tied: bool
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def fit(adapter: Adapter, base: Source) -> Fit:
    """Matches every tensor of the adapter with the base.

    Raises SourceError, with the number of tensors that match and all that do not, unless the adapter is wholly used.
    """
    return _Fitter(adapter, base).fit()


@dataclass
class _Table:
    """The whole matrices that an adapter holds for an end: one that was trained, one that the base had meanwhile."""

    saved: str | None = None
    frozen: str | None = None
    listed: bool = False  # under modules_to_save: a copy of its own, whatever the base shares


@dataclass
class _Fitter:
    adapter: Adapter
    base: Source
    changes: dict[str, Change] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)  # (what is wrong, key)
    others: list[str] = field(default_factory=list)  # faults that are no tensor's
    tables: dict[str, _Table] = field(default_factory=lambda: {end: _Table() for end in _ENDS})

    def fit(self) -> Fit:
        spec = self.base.spec
        if spec.family not in FAMILIES:
            raise SourceError(f"{self.base.ref} is a {spec.family} model, whose adapters cannot be merged.")
        family = FAMILIES[spec.family]
        self.names = family.names
        # The same text model inside a multimodal one: an adapter of either fits both.
        wrappers = [wrapper for wrapper in WRAPPERS.values() if wrapper.text_type == spec.family]
        roots = [root for wrapper in wrappers for root in wrapper.roots.items()]
        self.all_names: list[Names] = [family.names, *(family.names_below(*root) for root in roots)]
        self.vocab_size = self._vocab_size()
        vocabulary = (self.vocab_size, spec.hidden_size)
        self.shapes = tensors_of(spec) | {"embed": vocabulary, "head": vocabulary}
        for key in self.adapter.unknown:
            self._fault("no part of a LoRA", key)
        for key, entry in self.adapter.entries.items():
            if entry.dtype not in FLOATS:
                self._fault(f"{entry.dtype} instead of F32, F16 or BF16", key)
        for module in self.adapter.modules.values():
            self._module(module)
        self._layers()
        if not self.adapter.entries:
            self.others.append("it holds no tensors")
        if not self.faults:
            self._effects()
        self._report()
        tied = self._tied() if spec.tied else self._untied()
        self._report()
        return Fit(self.changes, self.vocab_size, tied, tuple(self.notes), tuple(self.warnings))

    def _fault(self, reason: str, *keys: str) -> None:
        self.faults += [(reason, key) for key in keys]

    def _report(self) -> None:
        if not self.faults and not self.others:
            return
        total = len(self.adapter.entries)
        bad = len({key for _, key in self.faults})
        texts = [
            f"{', '.join(folded(key for _, key in group))} ({reason})"
            for reason, group in groupby(sorted(self.faults), lambda fault: fault[0])
        ]
        raise SourceError(
            f"adapter {self.adapter.ref} does not fit {self.base.ref}: {total - bad} of its {total} tensors match and "
            f"{bad} do not: {'; '.join([*texts, *self.others])}: use the model that it was trained on, and the whole "
            "adapter."
        )

    def _canonical(self, module: Module, leaf: str) -> str | None:
        found = (names.canonical(f"{module.path}.{leaf}") for names in self.all_names)
        return next((name for name in found if name is not None), None)

    def _vocab_size(self) -> int:
        """The rows of the whole tables that the adapter brings, or the base's."""
        for module in self.adapter.modules.values():
            if self._canonical(module, "weight") in _ENDS:
                for role, key in module.keys.items():
                    if role.endswith("weight") and self.adapter.entries[key].shape:
                        return self.adapter.entries[key].shape[0]
        return self.base.spec.vocab_size

    def _module(self, module: Module) -> None:
        keys = dict(module.keys)
        weight, bias = self._canonical(module, "weight"), self._canonical(module, "bias")
        biases = {role: keys.pop(role) for role in list(keys) if role.endswith("bias")}
        if reason := self._absent(weight):
            self._fault(reason, *keys.values())
        elif weight is not None:
            self._weight(weight, module, keys)
        if not biases:
            return
        if reason := self._absent(bias):
            self._fault(reason if self._absent(weight) else "the model has no bias there", *biases.values())
        elif bias is not None:
            self._bias(bias, module, biases)

    def _absent(self, name: str | None) -> str:
        """Why the model has no tensor `name`, or nothing."""
        spec = self.base.spec
        if name is None:
            return f"a {spec.family} model has no such module"
        if name in self.shapes:
            return ""
        if int(name.split(".")[1]) >= spec.n_layers:
            return f"the model has {spec.n_layers} layers"
        return "the model has no such tensor"

    def _weight(self, name: str, module: Module, keys: dict[str, str]) -> None:
        """The whole tensors and the LoRA of one module's weight."""
        config = self.adapter.config
        lora = {role: keys.pop(role) for role in list(keys) if "weight" not in role}
        for key in keys.values():
            self._shape(key, self.shapes[name])
        saved, twice = keys.get("modules_to_save.weight"), keys.get("weight")
        if saved and twice and not self._equal(saved, twice):
            self._fault("two different tensors for one place", saved, twice)
        frozen = keys.get("base_layer.weight") or keys.get("original_module.weight")
        if lora and not saved:  # before peft had `base_layer`, a module with a LoRA kept its own weight under its name
            if frozen and twice and not self._equal(frozen, twice):
                self._fault("two different tensors for one place", frozen, twice)
            frozen = frozen or twice
        else:
            saved = saved or twice
        if name in _ENDS:
            listed = "modules_to_save.weight" in keys or any(module.path.endswith(m) for m in config.modules_to_save)
            self.tables[name] = _Table(saved, frozen, listed)
        change = Change(saved or frozen)
        if lora and saved:
            self._fault("a LoRA and a whole tensor for one place", saved, *lora.values())
        elif lora:
            change = self._lora(name, module, lora, frozen)
        self.changes[name] = change

    def _lora(self, name: str, module: Module, lora: dict[str, str], frozen: str | None) -> Change:
        config, embedding = self.adapter.config, name == "embed"
        part = name.rpartition(".")[2]
        if part not in (*LAYER_MATRICES, *_ENDS):
            self._fault("the model has no matrix there", *lora.values())
            return Change()
        magnitude = lora.pop("magnitude_vector", None)
        first, second = ("embedding_A", "embedding_B") if embedding else ("A", "B")
        a, b = lora.pop(first, None), lora.pop(second, None)
        self._fault(f"an embedding has {first} and {second}" if embedding else f"not for {part}", *lora.values())
        if a is None or b is None:
            self._fault(f"without its lora_{second if a else first}", *(key for key in (a, b, magnitude) if key))
            return Change()
        if config.use_dora and magnitude is None:
            self._fault("use_dora is true, and its lora_magnitude_vector is missing", a, b)
        if config.lora_bias and "B.bias" not in module.keys:
            self._fault("lora_bias is true, and its lora_B.bias is missing", a, b)
        if magnitude is not None and not config.use_dora:
            self._fault("use_dora is false", magnitude)
        outputs, inputs = reversed(self.shapes[name]) if embedding else self.shapes[name]
        rank = config.rank(module.path)
        got = self.adapter.entries[a].shape, self.adapter.entries[b].shape
        if (
            len(got[0]) == len(got[1]) == 2
            and got[0][0] == got[1][1] != rank
            and (got[0][1], got[1][0])
            == (
                inputs,
                outputs,
            )
        ):
            self._fault(f"of rank {got[0][0]}, and {rank} by r and rank_pattern", a, b)
        else:
            self._shape(a, (rank, inputs))
            self._shape(b, (outputs, rank))
        if magnitude is not None:
            self._shape(magnitude, (outputs,))
        return Change(frozen, a, b, None, magnitude, embedding, config.scale(module.path), rank)

    def _bias(self, name: str, module: Module, keys: dict[str, str]) -> None:
        config, added = self.adapter.config, keys.pop("B.bias", None)
        whole = next((keys[f"{w}bias"] for w in ("modules_to_save.", "", "base_layer.") if f"{w}bias" in keys), None)
        for key in [*keys.values(), *([added] if added else [])]:
            self._shape(key, self.shapes[name])
        if added and not config.lora_bias:
            self._fault("lora_bias is false", added)
        self.changes[name] = Change(whole, bias=added, scale=config.scale(module.path))

    def _shape(self, key: str, wanted: tuple[int, ...]) -> None:
        got = self.adapter.entries[key].shape
        if got != wanted:
            self._fault(f"{list(got)} instead of {list(wanted)}", key)

    def _equal(self, key: str, other: str) -> bool:
        return key == other or np.array_equal(self.adapter.read(key), self.adapter.read(other))

    def _layers(self) -> None:
        """layers_to_transform has to be the layers of the LoRA tensors."""
        wanted = self.adapter.config.layers
        if wanted is None:
            return
        there: dict[int, list[str]] = {}
        for name, change in self.changes.items():
            if name.startswith("layers.") and change.a and change.b:
                there.setdefault(int(name.split(".")[1]), []).extend((change.a, change.b))
        for layer in there.keys() - wanted:
            self._fault(f"layers_to_transform does not name layer {layer}", *there[layer])
        if absent := sorted(wanted - there.keys()):
            self.others.append(f"layers_to_transform names {', '.join(map(str, absent))}, without a tensor for them")

    def _effects(self) -> None:
        """Reads every pair: one that is not finite is refused, one whose product is zero is a warning."""
        pairs = {name: c for name, c in self.changes.items() if c.a and c.b}
        idle = []
        for name, change in pairs.items():
            factors = {key: self.adapter.read(key) for key in (change.a, change.b) if key}
            self._fault("not finite", *(key for key, values in factors.items() if not np.isfinite(values).all()))
            if not change.magnitude and (change.scale == 0 or not all(values.any() for values in factors.values())):
                idle.append(name)
        if idle and len(idle) == len(self.changes):
            self.warnings.append(f"the adapter has no effect: its product is zero in all {len(idle)} matrices")
        elif idle:
            self.warnings.append(
                f"the adapter has no effect on {len(idle)} of its {len(pairs)} matrices, where its product is zero: "
                f"{', '.join(folded(idle))}"
            )
        paths = list(self.adapter.modules)
        targets = [t for t in self.adapter.config.targets if t != "all-linear"]
        if unused := [t for t in targets if not any(p == t or p.endswith(f".{t}") for p in paths)]:
            self.notes.append(f"target_modules names {', '.join(sorted(unused))}, for which the adapter has no tensors")

    def _untied(self) -> bool:
        if self.vocab_size != self.base.spec.vocab_size:
            for end, other in (_ENDS, _ENDS[::-1]):
                table = self.tables[end]
                if (key := table.saved or table.frozen) and not (self.tables[other].saved or self.tables[other].frozen):
                    rows = f"{self.vocab_size} rows, while {self.names.own(other)} keeps {self.base.spec.vocab_size}"
                    self._fault(rows, key)
            self._resized()
        return False

    def _tied(self) -> bool:
        """Sorts out which end of a tied model takes which table; whether both are one matrix still."""
        embed, head = (self.tables[end] for end in _ENDS)
        frozen = [key for key in (embed.frozen, head.frozen) if key]
        if len(frozen) == 2 and not self._equal(*frozen):
            self._fault("two different tables of one tied model", *frozen)
        shared = frozen[0] if frozen else None
        resized = self.vocab_size != self.base.spec.vocab_size
        for own, other in ((embed, head), (head, embed)):
            if own.saved and not other.saved and resized and shared is None:
                other.saved = own.saved  # rows for the other end are nowhere else
        if embed.saved and not head.saved and not embed.listed:
            if not self._is_base(embed.saved):
                self._fault(
                    "the model is tied, and neither a tensor for its head nor modules_to_save says whether the head "
                    "follows",
                    embed.saved,
                )
            embed.saved = None
        if shared and not resized and self._is_base(shared):
            shared = None
        tables = {"embed": embed.saved or shared, "head": head.saved or shared}
        changes = {}
        for end, key in tables.items():
            change = self.changes.pop(end, Change())
            changes[end] = Change(
                key, change.a, change.b, None, change.magnitude, change.embedding, change.scale, change.rank
            )
        tied = self._one_matrix(changes["embed"], changes["head"])
        if self.adapter.config.ensure_weight_tying and not tied:
            self.others.append("ensure_weight_tying is true, but the embedding and the head do not change alike")
        self.changes |= {end: c for end, c in changes.items() if c != Change() and not (tied and end == "head")}
        if resized:
            self._resized()
        if not tied:
            self.notes.append("the model is no longer tied: its embedding and its head are two matrices from here on")
        return tied

    def _resized(self) -> None:
        self.notes.append(f"the vocabulary has {self.vocab_size} rows instead of {self.base.spec.vocab_size}")

    def _is_base(self, key: str) -> bool:
        """Whether a table is the one that the tied base has anyway."""
        return np.array_equal(self.adapter.read(key), self.base.tensor("embed"))

    def _one_matrix(self, embed: Change, head: Change) -> bool:
        if (embed.replaced or head.replaced) and not (
            embed.replaced and head.replaced and self._equal(embed.replaced, head.replaced)
        ):
            return False
        if embed.a is None and head.a is None:
            return True
        if not (embed.a and embed.b and head.a and head.b) or embed.magnitude or head.magnitude:
            return False
        read = self.adapter.read
        return (
            embed.scale == head.scale
            and np.array_equal(read(embed.a).T, read(head.b))
            and np.array_equal(read(embed.b).T, read(head.a))
        )
