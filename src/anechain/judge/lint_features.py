"""The features that data/compatibility.toml speaks of: what a package has that a system may handle well or badly."""

from collections.abc import Callable, Iterator, Mapping

from anechain.judge import lint_rules_ops as ops
from anechain.judge import lint_rules_shapes as shapes
from anechain.judge import lint_rules_state as state
from anechain.judge import lint_rules_types as types
from anechain.judge import lint_rules_weights as weights
from anechain.judge.lint_view import Hit, Package, on


def _any(package: Package) -> Iterator[Hit]:
    yield Hit("any program")


def _spec_9(package: Package) -> Iterator[Hit]:
    if package.spec_version == 9:
        yield Hit("specification version 9")


def _state(package: Package) -> Iterator[Hit]:
    for view in package.views:
        for value in view.function.states:
            yield on(view, value, f"state {value.name}")


def _palette(package: Package) -> Iterator[Hit]:
    if package.spec_version >= 9:
        yield from weights.palettised(package)


def _enumerated(package: Package) -> Iterator[Hit]:
    for view in package.views:
        if names := [f.name for f in view.interface.inputs if f.flexible and not f.ranged]:
            yield Hit(f"input {names[0]} has enumerated shapes", view, name=names[0])


ANY_PROGRAM = "any"
FEATURES: Mapping[str, Callable[[Package], Iterator[Hit]]] = {
    ANY_PROGRAM: _any,
    "spec-9": _spec_9,
    "target-26": types.target_26,
    "no-need-of-18": types.target_18_without_need,
    "state": _state,
    "unlike-states": state.unlike_states,
    "slice-update": state.moving_update,
    "long-slice-update": state.long_moving_update,
    "fused-attention": ops.fused_attention,
    "rank-5-attention": shapes.rank_5_attention,
    "enumerated-shapes": _enumerated,
    "int8": weights.int8_at_all,
    "int8-channel": weights.int8_channel,
    "per-block": weights.per_block,
    "palette": _palette,
    "palette-4bit-state": weights.palettised_4bit_state,
    "scaled-palette": weights.scaled_palette,
    "activation-quantised": weights.quantized_activation,
    "choosing": ops.choosing,
}
