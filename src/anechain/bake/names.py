"""Tensor names of a checkpoint <-> canonical names, and whether its tensors are those that a ModelSpec needs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from anechain.bundle.spec import ModelSpec, tensors_of
from anechain.errors import SourceError

# Which config fields decide each axis of a tensor, for the sentence that reports a contradiction.
_HIDDEN, _FFN, _HEAD_DIM = ("hidden_size",), ("intermediate_size",), ("head_dim",)
_QUERY, _KEY = ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim")
_AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embed": (("vocab_size",), _HIDDEN), "head": (("vocab_size",), _HIDDEN), "final_norm": (_HIDDEN,),
    "attn_norm": (_HIDDEN,), "attn_post_norm": (_HIDDEN,), "ffn_norm": (_HIDDEN,), "ffn_post_norm": (_HIDDEN,),
    "q_norm": (_HEAD_DIM,), "k_norm": (_HEAD_DIM,),
    "q": (_QUERY, _HIDDEN), "k": (_KEY, _HIDDEN), "v": (_KEY, _HIDDEN), "o": (_HIDDEN, _QUERY),
    "q_bias": (_QUERY,), "k_bias": (_KEY,), "v_bias": (_KEY,), "o_bias": (_HIDDEN,),
    "gate": (_FFN, _HIDDEN), "up": (_FFN, _HIDDEN), "down": (_HIDDEN, _FFN),
    "gate_bias": (_FFN,), "up_bias": (_FFN,), "down_bias": (_HIDDEN,),
}  # fmt: skip


@dataclass(frozen=True)
class Names:
    """The tensor names of one file format: `top` and `layer` map canonical names to the file's, `{}` is the layer."""

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str

    def own(self, canonical: str) -> str:
        """`layers.3.q` -> `model.layers.3.self_attn.q_proj.weight`."""
        if canonical in self.top:
            return self.top[canonical]
        _, index, part = canonical.split(".")
        return self.layer_prefix.format(index) + self.layer[part]

    def canonical(self, own: str) -> str | None:
        """The inverse of `own`; None for a name that is not of this family."""
        for canonical, name in self.top.items():
            if name == own:
                return canonical
        before, after = self.layer_prefix.split("{}")
        found = re.fullmatch(re.escape(before) + r"(0|[1-9]\d*)" + re.escape(after) + "(.+)", own)
        part = next((part for part, name in self.layer.items() if found and name == found[2]), None)
        return f"layers.{found[1]}.{part}" if found and part else None


def check_tensors(
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    unknown: Iterable[str],
    names: Names,
    where: str,
    *,
    field_names: Mapping[str, str] = MappingProxyType({}),
    also: Iterable[str] = (),
) -> None:
    """Raise SourceError unless `shapes` (canonical name -> shape) is exactly what `spec` needs, naming every offender.

    `unknown` are the file's tensors without a canonical name; `where`, `field_names` and `also` are as in
    `family.spec_of`. A tied model may carry a `head`: whether it says the same as the embedding is for the Source to
    compare.
    """
    expected = tensors_of(spec)
    allowed = expected.keys() | {"head"}
    missing = [name for name in expected if name not in shapes]
    unused = [*unknown, *(names.own(name) for name in shapes if name not in allowed)]
    faults = [*also]
    if "head" in missing:
        missing.remove("head")
        tied = field_names.get("tie_word_embeddings", "tie_word_embeddings")
        faults.append(f"{names.own('head')} is missing although {tied} is false (set it to true if the head is tied)")
    if missing:
        faults.append(f"missing tensors: {', '.join(folded(map(names.own, missing)))}")
    if unused:
        faults.append(f"tensors that nothing uses: {', '.join(folded(unused))}")
    vocabulary = (spec.vocab_size, spec.hidden_size)
    for name, shape in shapes.items():
        wanted = expected.get(name, vocabulary)
        if name in allowed and shape != wanted:
            axes = _AXES[name.rpartition(".")[2]]
            differ = [a for i, a in enumerate(axes) if len(shape) != len(wanted) or shape[i] != wanted[i]]
            fields = list(dict.fromkeys(field_names.get(f, f) for axis in differ for f in axis))
            faults.append(f"{names.own(name)} is {list(shape)}, but {list(wanted)} by {' and '.join(fields)}")
    if faults:
        raise SourceError(f"{where} does not fit its configuration: {'; '.join(faults)}.")


def folded(names: Iterable[str]) -> list[str]:
    """All names, those that differ in one run of numbers written once: `layers.{0..29}.up`, `layers.{0,2}.up`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(\D*)(0(?!\d)|[1-9]\d*|)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        groups.setdefault((before, after), []).extend([int(number)] if number else [])
    result = []
    for (before, after), numbers in groups.items():
        first, last = (min(numbers), max(numbers)) if numbers else (0, 0)
        if len(numbers) > 2 and last - first + 1 == len(set(numbers)):
            result.append(f"{before}{{{first}..{last}}}{after}")
        elif len(numbers) > 1:
            result.append(f"{before}{{{','.join(map(str, sorted(numbers)))}}}{after}")
        else:
            result.append(before + "".join(map(str, numbers)) + after)
    return result
