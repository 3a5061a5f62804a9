"""config.json -> the kinds of attention and the kind of each layer: windows and rotations in all their spellings."""

from collections.abc import Mapping
from typing import Any, Literal

from anechain.bake.fields import Reader, short
from anechain.bake.rope import rope_of
from anechain.bundle.spec import Attention, Rope

# Which layers see only a window: none whatever the config says, all if it says so, or each as the config says.
Windows = Literal["none", "all", "by layer"]

FULL, SLIDING = "full_attention", "sliding_attention"
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")  # every how many layers a full one comes
_PATTERN = 6  # Gemma 3's


def attentions_of(
    read: Reader, windows: Windows, theta: float, local_theta: float, max_context: int, n_layers: int
) -> tuple[tuple[Attention, ...], tuple[int, ...]]:
    """The attentions that layers use, and for each layer which; faults go to `read`.

    `theta` and `local_theta` are the model type's own rotation bases, for where the config has none.
    """
    config = read.config
    if windows == "by layer":
        return _by_layer(read, theta, local_theta, max_context, n_layers)
    rope = _rope(read, config, theta, max_context)
    window = None
    if windows == "all" and config.get("sliding_window") is not None:
        window = read.whole("sliding_window")
    kind = FULL if window is None else SLIDING
    kinds = config.get("layer_types")
    if kinds is not None and kinds != [kind] * n_layers:
        read.faults.append(f"layer_types = {short(kinds)} is not supported (only {kind}, {n_layers} times, is)")
    return (Attention("full" if window is None else "sliding", rope, window),), (0,) * n_layers


def _by_layer(
    read: Reader, theta: float, local_theta: float, max_context: int, n_layers: int
) -> tuple[tuple[Attention, ...], tuple[int, ...]]:
    """Gemma 3: local layers have a window and a rotation of their own, which no scaling of the global one touches."""
    config, kinds = read.config, _kinds(read, n_layers)
    nested = config.get("rope_parameters")
    if nested is not None and (not isinstance(nested, dict) or not nested.keys() <= {FULL, SLIDING}):
        read.faults.append(
            f"rope_parameters = {short(nested)} (one set for {FULL} and one for {SLIDING} is understood)"
        )
        nested = None
    ropes = nested or {}
    spelled: dict[str, tuple[Mapping[str, Any], float, str]] = {
        FULL: (
            {
                "rope_parameters": ropes.get(FULL),
                "rope_theta": config.get("rope_theta"),
                "rope_scaling": config.get("rope_scaling"),
            },
            theta,
            "rope_theta",
        ),
        SLIDING: (
            {"rope_parameters": ropes.get(SLIDING), "rope_theta": config.get("rope_local_base_freq")},
            local_theta,
            "rope_local_base_freq",
        ),
    }
    attentions = []
    used = [kind for kind in (FULL, SLIDING) if kind in kinds]
    for kind in (FULL, SLIDING):  # what is wrong with the parameters of a kind that no layer has is said, too
        parameters, default, field = spelled[kind]
        rope = _rope(read, parameters, default, max_context, field, f" of {kind}")
        if kind in used:
            window = read.whole("sliding_window") if kind == SLIDING else None
            attentions.append(Attention(kind.removesuffix("_attention"), rope, window))
    return tuple(attentions), tuple(used.index(kind) for kind in kinds)


def _rope(
    read: Reader, parameters: Mapping[str, Any], theta: float, max_context: int, field: str = "rope_theta", of: str = ""
) -> Rope:
    rope, faults = rope_of(parameters, theta, max_context, field)
    read.faults += [f"{fault}{of}" for fault in faults]
    return rope


def _kinds(read: Reader, n_layers: int) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer, from the list or else from the pattern's length.

    transformers writes `_sliding_window_pattern` beside any list and never reads it then; the two are not compared.
    """
    config = read.config
    patterns = {name: read.whole(name) for name in _PATTERNS if config.get(name) is not None}
    if len(set(patterns.values())) > 1:
        read.faults.append(
            " and ".join(f"{name} = {n}" for name, n in patterns.items()) + " differ (keep the right one)"
        )
    pattern = next(iter(patterns.values()), _PATTERN)
    regular = [SLIDING if (i + 1) % pattern else FULL for i in range(n_layers)]
    stated = config.get("layer_types")
    if stated is None:
        return regular
    if not isinstance(stated, list) or len(stated) != n_layers or not all(kind in (FULL, SLIDING) for kind in stated):
        read.faults.append(f"layer_types = {short(stated)} (one of {FULL} and {SLIDING} for each of {n_layers} layers)")
        return regular
    if _PATTERNS[0] in patterns and stated != regular:
        read.faults.append(
            f"layer_types = {short(stated)} and {_PATTERNS[0]} = {pattern} (they differ: keep the right one)"
        )
    return stated
