"""config.json -> ModelSpec, compared with what transformers makes of the same config; and all that is refused."""

import math
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anechain.bake.family import FAMILIES, spec_of
from anechain.bake.names import folded
from anechain.bundle.spec import ModelSpec, Rope, tensors_of
from anechain.errors import SourceError
from tests.tiny import REMOVED, tiny_config, tiny_shapes

WHERE = "dir/config.json"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def spec_from(config: dict[str, Any], tensors: dict[str, Any] | None = None) -> ModelSpec:
    names = FAMILIES[config["model_type"]].names
    present = [names.canonical(own) for own in (tiny_shapes(config) if tensors is None else tensors)]
    assert None not in present
    return spec_of(config, [name for name in present if name], WHERE)


def spec(family: str, **changes: Any) -> ModelSpec:
    return spec_from(tiny_config(family, **changes))


def refusal(family: str, **changes: Any) -> str:
    with pytest.raises(SourceError) as caught:
        spec(family, **changes)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and WHERE in message
    return message


def transformers_config(config: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**config)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_spec_is_what_transformers_reads(family: str) -> None:
    config = tiny_config(family)
    theirs, ours = transformers_config(config), spec(family)
    pairs = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "num_hidden_layers": ours.n_layers,
        "num_attention_heads": ours.n_heads,
        "num_key_value_heads": ours.n_kv_heads,
        "head_dim": ours.head_dim,
        "intermediate_size": ours.ffn_size,
        "rms_norm_eps": ours.rms_eps,
        "max_position_embeddings": ours.max_context,
        "tie_word_embeddings": ours.tied,
    }
    assert {name: getattr(theirs, name) for name in pairs} == pairs
    assert ours.attentions[0].rope == Rope(theirs.rope_parameters["rope_theta"])
    assert ours.family == family and ours.qk_norm == (family == "qwen3")
    assert ours.attention_scale == pytest.approx(1 / math.sqrt(ours.head_dim))
    assert (ours.qkv_bias, ours.o_bias, ours.ffn_bias) == (False, False, False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_defaults_of_the_model_type(family: str) -> None:
    absent = dict.fromkeys(["rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"], REMOVED)
    absent |= dict.fromkeys(["num_key_value_heads", "hidden_act", "rope_scaling"], REMOVED)
    config = tiny_config(family, **absent)
    ours = spec_from(config, tiny_shapes(tiny_config(family, tie_word_embeddings=False)))
    theirs = transformers_config(config)
    assert ours.attentions[0].rope.theta == theirs.rope_parameters["rope_theta"] == 10000
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.tied is theirs.tie_word_embeddings is False
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.n_kv_heads == ours.n_heads


@pytest.mark.parametrize("head_dim", [None, REMOVED])
def test_head_dim_is_derived_when_null_or_absent(head_dim: Any) -> None:
    assert spec("qwen3", head_dim=head_dim).head_dim == 16
    assert spec("llama", head_dim=head_dim).attention_scale == 0.25
    assert spec("qwen3").head_dim == 32


def test_head_dim_cannot_be_derived_from_a_remainder() -> None:
    assert "num_attention_heads = 3 does not divide hidden_size = 64; give head_dim" in refusal(
        "llama", num_attention_heads=3, num_key_value_heads=1
    )
    assert spec("llama", num_attention_heads=3, num_key_value_heads=1, head_dim=16).head_dim == 16


ROPES: list[tuple[dict[str, Any], Rope]] = [
    ({"rope_type": "default"}, Rope(5e5)),
    ({"rope_type": "linear", "factor": 2}, Rope(5e5, "linear", 2.0)),
    (LLAMA3, Rope(5e5, "llama3", 8.0, 1.5, 5.0, 32)),
    (YARN, Rope(5e5, "yarn", 4.0, original_context=128, attention_factor=0.1 * math.log(4) + 1)),
    (
        YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25, "truncate": False},
        Rope(5e5, "yarn", 4.0, 1.0, 4.0, 128, 16.0, 2.0, 1.25, False),
    ),
]


@pytest.mark.parametrize("parameters, expected", ROPES)
def test_rope_in_its_three_spellings(parameters: dict[str, Any], expected: Rope) -> None:
    old_name = {"type" if key == "rope_type" else key: value for key, value in parameters.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": REMOVED, "rope_scaling": REMOVED, "rope_parameters": parameters | {"rope_theta": 5e5}},
        {"rope_theta": 500000, "rope_scaling": parameters},
        {"rope_theta": 5e5, "rope_scaling": old_name},
        {"rope_theta": 5e5, "rope_scaling": old_name, "rope_parameters": parameters | {"rope_theta": 500000}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": parameters},
        {"rope_theta": 5e5, "rope_scaling": REMOVED, "rope_parameters": parameters | {"partial_rotary_factor": 1.0}},
    ]
    for spelling in spellings:
        assert spec("llama", **spelling).attentions[0].rope == expected, spelling


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": 1.5},
        {"mscale": 1.3, "mscale_all_dim": 0.7},
        {"mscale": 1.3},
        {"mscale": 0, "mscale_all_dim": 0.7},
        {"factor": 0.5},
        {"factor": 40.0},
    ],
)
def test_yarn_attention_factor_is_that_of_transformers(changes: dict[str, Any]) -> None:
    parameters = YARN | changes
    theirs = transformers_config(tiny_config("llama", rope_scaling=dict(parameters)))
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = spec("llama", rope_scaling=parameters).attentions[0].rope
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_yarn_without_an_original_context_takes_the_model_s() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    theirs = transformers_config(tiny_config("llama", rope_scaling=dict(scaling)))
    ours = spec("llama", rope_scaling=scaling).attentions[0].rope
    assert ours.original_context == theirs.rope_parameters["original_max_position_embeddings"] == 512


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "banana", 7, ["yarn"]])
def test_other_rope_kinds_are_refused(kind: Any) -> None:
    message = refusal("llama", rope_scaling={"rope_type": kind, "factor": 2.0})
    assert f"rope_type = {kind!r} (the supported ones are default, linear, llama3, yarn)" in message
    assert "rope_type" in refusal("qwen3", rope_scaling={"type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rope_parameters": {"rope_theta": 2e4}}, "rope_theta in rope_parameters = 20000.0 and top-level rope_theta"),
        ({"rope_scaling": {"type": "default", "rope_theta": 2e4}}, "rope_theta in rope_scaling = 20000.0 (they differ"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling differ",
        ),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 32.0}},
            "rope_parameters and rope_scaling differ",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_type = 'linear' and type =",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of parameters for all layers"),
        ({"rope_parameters": 3}, "rope_parameters = 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' without factor"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_type 'linear' without factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mystery": 1}}, "mystery = 1 with rope_type 'linear'"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section = [1] with rope_type 'default'"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate = 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor is not below high_freq_factor"),
        ({"rope_theta": 0}, "top-level rope_theta = 0 (use a positive number)"),
        ({"rope_theta": "1e4"}, "top-level rope_theta = '1e4'"),
    ],
)
def test_rope_that_is_wrong_or_ambiguous_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal("llama", **changes)


def test_llama3_without_parameters_names_each() -> None:
    message = refusal("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        assert f"rope_type 'llama3' without {name}" in message


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported (only 'silu' is)"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported (only 1 is)"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported (only False is)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported (only 1 is)"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] is not supported"),
        ({"no_rope_layer_interval": 4}, "no_rope_layer_interval = 4 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant_method': 'fp8'} is not"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config = {'0': {'head_dim': 8}} is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map = {'AutoModel': 'x.Y'} is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        (
            {"layer_types": ["full_attention"]},
            "layer_types = ['full_attention'] is not supported (only full_attention, 2",
        ),
        ({"layer_scale_of_tomorrow": 0.5}, "layer_scale_of_tomorrow = 0.5 is not understood"),
        ({"layer_scale_of_tomorrow": False}, "layer_scale_of_tomorrow = False is not understood"),
        ({"hidden_size": REMOVED, "head_dim": 16}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size = '64' (use a whole number of at least 1)"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"intermediate_size": 96.0}, "intermediate_size = 96.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' (use a positive number)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' (use true or false)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_changes_the_mathematics_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    config = tiny_config(family, **changes)
    with pytest.raises(SourceError) as caught:
        spec_from(config, tiny_shapes(tiny_config(family)))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_all_offenders_are_in_one_sentence() -> None:
    message = refusal(
        "llama", hidden_act="relu", pretraining_tp=4, mystery=1, rope_scaling={"type": "dynamic"}, rms_norm_eps=-1,
        attn_logit_softcapping=2.0,
    )  # fmt: skip
    for name in ("hidden_act", "pretraining_tp", "mystery", "'dynamic'", "rms_norm_eps", "attn_logit_softcapping"):
        assert name in message


def test_sliding_window_without_its_switch() -> None:
    """Qwen3 reads the field only with use_sliding_window; Llama never reads it, so a value there is a contradiction."""
    assert spec("qwen3", sliding_window=4096, max_window_layers=1).attentions[0].window is None
    assert "sliding_window = 4096 is not supported" in refusal("llama", sliding_window=4096)


def test_values_that_change_nothing_are_accepted() -> None:
    plain = spec("llama")
    harmless = {
        "pretraining_tp": 1, "partial_rotary_factor": 1.0, "quantization_config": None, "no_rope_layers": None,
        "mystery": None, "layer_types": ["full_attention"] * 2, "hidden_act": "swish", "use_cache": True,
        "attention_dropout": 0.1, "transformers_version": "5.24.0", "rope_interleaved": False, "is_llama_config": True,
    }  # fmt: skip
    assert spec("llama", **harmless) == plain


def test_biases_follow_the_tensors() -> None:
    both = spec("llama", attention_bias=True, mlp_bias=True)
    assert (both.qkv_bias, both.o_bias, both.ffn_bias) == (True, True, True)
    assert "layers.1.gate_bias" in tensors_of(both)
    without_field = tiny_config("llama", attention_bias=REMOVED, mlp_bias=REMOVED)
    with_biases = tiny_shapes(tiny_config("llama", attention_bias=True))
    no_o = {name: shape for name, shape in with_biases.items() if not name.endswith("o_proj.bias")}
    assert len(no_o) == len(with_biases) - 2
    found = spec_from(without_field, no_o)
    assert (found.qkv_bias, found.o_bias, found.ffn_bias) == (True, False, False)


def test_biases_that_contradict_the_config_are_refused() -> None:
    plain, biased = tiny_config("llama"), tiny_config("llama", attention_bias=True, mlp_bias=True)
    with pytest.raises(
        SourceError, match=r"attention_bias is true but .*; mlp_bias is true but the checkpoint has none"
    ):
        spec_from(biased, tiny_shapes(plain))
    with pytest.raises(SourceError, match="attention_bias is false but the checkpoint has these biases"):
        spec_from(plain, tiny_shapes(biased))


@pytest.mark.parametrize("model_type", ["smollm3", "gpt2", "mixtral", 3])
def test_unknown_model_types_are_refused(model_type: Any) -> None:
    config = tiny_config("llama") | {"model_type": model_type, "no_rope_layers": [1, 0]}
    with pytest.raises(SourceError) as caught:
        spec_of(config, (), WHERE)
    assert str(caught.value) == (
        f"{WHERE} has model_type {model_type!r}, which is not supported: use a model of {', '.join(FAMILIES)}."
    )


def test_config_without_model_type() -> None:
    with pytest.raises(SourceError, match=f"{WHERE} has no model_type: add the one"):
        spec_of(tiny_config("llama", model_type=REMOVED), (), WHERE)


def test_names_go_both_ways() -> None:
    for family in FAMILIES:
        config = tiny_config(family, num_hidden_layers=12, tie_word_embeddings=False)
        names = FAMILIES[family].names
        canonical = {own: names.canonical(own) for own in tiny_shapes(config)}
        assert set(canonical.values()) == set(tensors_of(spec_from(config)))
        assert all(names.own(name or "") == own for own, name in canonical.items())
        for foreign in ("model.layers.0.self_attn.q_proj.extra", "model.layers.x.mlp.up_proj.weight", "visual.weight"):
            assert names.canonical(foreign) is None
        assert names.canonical("model.layers.01.mlp.up_proj.weight") is None


def test_long_lists_of_names_are_folded_without_losing_any() -> None:
    names = [f"layers.{i}.up" for i in range(30)] + ["layers.3.down", "layers.7.down", "head", "layers.5.x.9", "a.007"]
    assert folded(names) == ["layers.{0..29}.up", "layers.{3,7}.down", "head", "layers.5.x.9", "a.007"]
