"""config.json -> Rope: two generations of spelling, four kinds of rotation, and no guessing between them."""

import math
from collections.abc import Mapping
from typing import Any

from anechain.bundle.spec import Rope

# The parameters that each kind needs, and those that it may have besides; `rope_theta` is read apart.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip


def rope_of(
    config: Mapping[str, Any], default_theta: float, max_context: int, theta_field: str = "rope_theta"
) -> tuple[Rope, list[str]]:
    """The rotation that `config` asks for, and what is wrong with it (then the Rope is a placeholder).

    `rope_parameters` (transformers 5) comes before top-level `rope_theta` and `rope_scaling`, and those before
    `default_theta`, the model type's own. Where both spellings are there they have to agree. `theta_field` is what the
    config file calls the `rope_theta` of `config`, for the sentences.
    """
    faults: list[str] = []
    new, old = (_parameters(config, field, faults) for field in ("rope_parameters", "rope_scaling"))
    thetas = {
        "rope_theta in rope_parameters": new.pop("rope_theta", None),
        f"top-level {theta_field}": config.get("rope_theta"),
        "rope_theta in rope_scaling": old.pop("rope_theta", None),
    }
    given = {place: theta for place, theta in thetas.items() if theta is not None}
    faults += [f"{place} = {theta!r} (use a positive number)" for place, theta in given.items() if not _positive(theta)]
    if len(set(map(repr, map(_as_float, given.values())))) > 1:
        stated = " and ".join(f"{place} = {theta!r}" for place, theta in given.items())
        faults.append(f"{stated} (they differ: keep the right one)")
    if new and old and new != old:
        faults.append("rope_parameters and rope_scaling differ (keep the right one)")
    parameters = new or old
    kind = parameters.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _NEEDED:
        faults.append(f"rope_type = {kind!r} (the supported ones are {', '.join(_NEEDED)})")
        kind, parameters = "default", {}
    faults += [f"rope_type {kind!r} without {key}" for key in _NEEDED[kind] if key not in parameters]
    known = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    faults += [f"{key} = {value!r} with rope_type {kind!r}" for key, value in parameters.items() if key not in known]
    for key in known:
        value = parameters.get(key)
        if key == "truncate":
            fits = value is None or isinstance(value, bool)
        else:
            fits = value is None or _positive(value) or (value == 0 and key.startswith("mscale"))
        if not fits:
            faults.append(f"{key} = {value!r} in the rope parameters")
    if not faults and kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        faults.append("low_freq_factor is not below high_freq_factor")
    if faults:
        return Rope(default_theta), faults
    return _rope(kind, float(next(iter(given.values()), default_theta)), parameters, max_context), []


def _rope(kind: str, theta: float, parameters: Mapping[str, Any], max_context: int) -> Rope:
    if kind == "linear":
        return Rope(theta, "linear", float(parameters["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            float(parameters["factor"]),
            float(parameters["low_freq_factor"]),
            float(parameters["high_freq_factor"]),
            int(parameters["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return Rope(
            theta,
            "yarn",
            float(parameters["factor"]),
            original_context=int(parameters.get("original_max_position_embeddings", max_context)),
            beta_fast=float(parameters.get("beta_fast", 32.0)),
            beta_slow=float(parameters.get("beta_slow", 1.0)),
            attention_factor=_yarn_attention_factor(parameters),
            truncate=parameters.get("truncate", True),
        )
    return Rope(theta)


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by: Peng et al. 2023 (YaRN), section 3.4, with DeepSeek's two `mscale`s."""
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1 else 1.0

    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return growth(numerator) / growth(denominator) if numerator and denominator else growth(1.0)


def _parameters(config: Mapping[str, Any], field: str, faults: list[str]) -> dict[str, Any]:
    """One of the two dictionaries, without nulls, its kind under `rope_type`; {} when it is absent or null."""
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict) or any(isinstance(part, dict) for part in value.values()):
        faults.append(f"{field} = {value!r} (one set of parameters for all layers is what is understood)")
        return {}
    parameters = {key: part for key, part in value.items() if part is not None}
    old_name = parameters.pop("type", "default")
    if parameters.setdefault("rope_type", old_name) != old_name and "type" in value:
        faults.append(f"{field} has rope_type = {parameters['rope_type']!r} and type = {old_name!r}")
    if parameters.get("partial_rotary_factor") == 1:
        del parameters["partial_rotary_factor"]
    return parameters


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _as_float(value: Any) -> Any:
    return float(value) if _positive(value) else value
