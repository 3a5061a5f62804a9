"""Checkpoints that wrap a language model in a larger one: the text part's config and the names of its tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anechain.bake.family import Family
from anechain.bake.fields import IGNORED, short
from anechain.bake.names import Names
from anechain.errors import SourceError


@dataclass(frozen=True)
class Wrapper:
    """A multimodal `model_type` around one of `family.FAMILIES`.

    `roots` are what the text model's tensors may begin with, and the head's name that belongs to it; older and newer
    versions of transformers write different ones. Tensors that begin with `skipped` are the other models'.
    """

    text_type: str
    roots: Mapping[str, str]
    skipped: tuple[str, ...]
    ignored: frozenset[str]  # fields of the outer config that no text depends on

    def names(self, family: Family, present: Iterable[str]) -> Names:
        """The names under the root that the checkpoint uses."""
        roots = list(self.roots)
        used = next((root for root in roots if any(own.startswith(root) for own in present)), roots[-1])
        return family.names_below(used, self.roots[used])


WRAPPERS = {
    "gemma3": Wrapper(
        "gemma3_text",
        roots={
            "language_model.model.": "language_model.lm_head.weight",
            "model.language_model.": "lm_head.weight",
        },
        skipped=(
            "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
        ),
        ignored=frozenset({
            "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
            "boi_token_id", "eoi_token_id", "image_token_id",
        }),
    ),
}  # fmt: skip
# Fields of the outer config that hold for the text model unless its own config has them.
_INHERITED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "auto_map")


def unwrapped(config: dict[str, Any], where: str) -> tuple[dict[str, Any], Wrapper | None, list[str]]:
    """The text model's config, its wrapper if there is one, what is wrong with the outer fields; raises SourceError."""
    model_type = config.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        return config, None, []
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise SourceError(f"{where} has model_type {model_type!r} and no text_config: fetch it again.")
    inner: dict[str, Any] = {"model_type": wrapper.text_type} | text
    faults = []
    known = {"model_type", "text_config", *IGNORED, *wrapper.ignored}
    for name, value in config.items():
        if value is None or name in known:
            continue
        if name not in _INHERITED:
            faults.append(f"{name} = {short(value)} is not understood beside text_config (remove it, or move it there)")
        elif inner.get(name) is None:
            inner[name] = value
        elif name == "tie_word_embeddings" and inner[name] != value:
            faults.append(f"{name} = {value!r} and {inner[name]!r} in text_config (they differ: keep the right one)")
        elif name == "eos_token_id":
            inner[name] = list(dict.fromkeys([*_listed(inner[name]), *_listed(value)]))
    return inner, wrapper, faults


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
