"""A checkpoint with a LoRA adapter merged into it: itself a Source, so that whatever follows knows no difference.

Tensors are merged one at a time, in float32, when they are asked for, before any rounding. The formulas are those of
peft 0.21 (tuners/lora/layer.py, dora.py).
"""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.adapter import Adapter
from anechain.bake.adapter_fit import Change, fit
from anechain.bake.family import FAMILIES
from anechain.bake.source import InRows, Rows, Source, open_source
from anechain.bundle.spec import ModelSpec, matrices_of
from anechain.errors import SourceError

_SLAB = 2**22  # elements of a product that are made at a time; a vocabulary's would take 600 MB at once
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


class Merged:
    """`base` with `adapter`; see `bake.source.Source`. `notes` and `warnings` are what a person should know.

    Raises SourceError, naming every offender, unless every tensor of the adapter has its place in the base.
    """

    def __init__(self, base: Source, adapter: Adapter) -> None:
        self.base, self.adapter = base, adapter
        self.ref = base.ref
        fitted = fit(adapter, base)
        self.changes = fitted.changes
        self.spec: ModelSpec = replace(base.spec, vocab_size=fitted.vocab_size, tied=fitted.tied)
        self.text_files, text_notes = _text_files(base.text_files, adapter)
        self.notes = [self._summary(), *fitted.notes, *text_notes]
        self.warnings = fitted.warnings

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the base's and the adapter's."""
        return hashlib.sha256(f"{self.base.fingerprint} {self.adapter.sha256}".encode()).hexdigest()

    def tensor(self, name: str) -> np.ndarray:
        if name not in self.changes:
            return self.base_tensor(name)
        less_one = name.endswith("norm") and FAMILIES[self.spec.family].norms_less_one
        return self.as_checkpoint(name) + np.float32(1) if less_one else self.as_checkpoint(name)

    def rows(self, name: str) -> Rows | None:
        base = "embed" if name == "head" and self.base.spec.tied else name
        return self.base.rows(base) if name not in self.changes and isinstance(self.base, InRows) else None

    def as_checkpoint(self, name: str) -> np.ndarray:
        """A tensor that the adapter changes, as a Hugging Face checkpoint of the family holds it; float32."""
        change = self.changes[name]
        weight = self.adapter.read(change.replaced) if change.replaced else self.base_tensor(name)
        return _changed(weight, change, self.adapter)

    def base_tensor(self, name: str) -> np.ndarray:
        """The tensor without the adapter; of a tied base, both ends have one."""
        return self.base.tensor("embed" if name == "head" and self.base.spec.tied else name)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What a bundle's manifest says of the adapter, without what rounding leaves of it."""
        layers = {int(name.split(".")[1]) for name in self.changes if name.startswith("layers.")}
        return {
            "ref": self.adapter.ref,
            "sha256": self.adapter.sha256,
            "base_fingerprint": self.base.fingerprint,
            "base_model": self.adapter.config.base_model,
            "layers": sorted(layers),
            "tensors": dict(sorted(Counter(name.rpartition(".")[2] for name in self.changes).items())),
            "replaced": sorted(name for name, change in self.changes.items() if change.replaced),
            "ranks": sorted({change.rank for change in self.changes.values() if change.a}),
            "notes": [*self.notes, *self.warnings],
        }

    def _summary(self) -> str:
        matrices = [name for name in self.changes if name in matrices_of(self.spec)]
        layers = {name.split(".")[1] for name in matrices if name.startswith("layers.")}
        ranks = sorted({change.rank for change in self.changes.values() if change.a})
        ends = [end for end in ("embed", "head") if end in matrices]
        others = len(self.changes) - len(matrices)
        parts = [
            f"{len(matrices) - len(ends)} matrices in {len(layers)} of {self.spec.n_layers} layers",
            *(f"the {'embedding' if end == 'embed' else 'head'}" for end in ends),
            *([f"{others} norms or biases"] if others else []),
        ]
        rank = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        return f"the adapter changes {', '.join(parts)}{rank}"


def open_merged(ref: str, adapter: str | None) -> Source:
    """What the user named as model and, if there is one, as adapter; raises SourceError."""
    base = open_source(ref)
    return base if adapter is None else Merged(base, Adapter(Path(adapter)))


def _changed(weight: np.ndarray, change: Change, adapter: Adapter) -> np.ndarray:
    """`weight` [O, I] f32 (an embedding is [V, H], and a bias [O]) as the adapter makes it, a fresh array."""
    merged = np.array(weight, np.float32)
    scale = np.float32(change.scale)
    if change.bias:
        return np.asarray(merged + scale * adapter.read(change.bias))
    if not (change.a and change.b):
        return merged
    a, b = adapter.read(change.a), adapter.read(change.b)
    left, right = (a.T, scale * b.T) if change.embedding else (b, scale * a)  # [rows, r], [r, columns]
    slab = max(1, _SLAB // merged.shape[1])
    for top in range(0, len(merged), slab):
        merged[top : top + slab] += left[top : top + slab] @ right
    if change.magnitude:
        axis = 0 if change.embedding else 1
        length = np.sqrt(np.einsum("oi,oi->i" if axis == 0 else "oi,oi->o", merged, merged, dtype=np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):  # whoever stores the weight refuses what is not finite
            factor = (adapter.read(change.magnitude) / length).astype(np.float32)
        merged *= np.expand_dims(factor, axis)
    return merged


def _text_files(base: dict[str, bytes], adapter: Adapter) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer's files, those beside the adapter before the base's, and a note if that makes a difference.

    The chat template counts by itself, wherever it is written: in a file of its own or in tokenizer_config.json.
    """
    own = adapter.text_files
    files = base | own
    if _CONFIG in own and _TEMPLATE not in own:
        config = _object(own[_CONFIG], adapter)
        inline = _object(base[_CONFIG], adapter).get("chat_template") if _CONFIG in base else None
        if config.get("chat_template") is not None:
            files.pop(_TEMPLATE, None)
        elif _TEMPLATE not in base and inline is not None:
            files[_CONFIG] = json.dumps(config | {"chat_template": inline}, indent=2).encode()
    notes = []
    if different := sorted(name for name, content in own.items() if base.get(name) != content):
        notes.append(f"{', '.join(different)} {'is' if len(different) == 1 else 'are'} the adapter's, not the model's")
    if "tokenizer.json" not in own and (adapter.directory / "added_tokens.json").exists():
        notes.append("the adapter has added_tokens.json but no tokenizer.json: tokens that it adds are not known")
    return files, notes


def _object(content: bytes, adapter: Adapter) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise SourceError(f"the {_CONFIG} of adapter {adapter.ref} or its model holds no JSON object: correct it.")
    return parsed
