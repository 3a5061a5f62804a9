"""Recipes: which rule wins, what is refused, and in which words."""

from importlib import resources
from pathlib import Path

import pytest

from anechain.bundle.recipe import FP16, Calibration, Recipe, Rule, Scheme, load_recipe, parse_recipe, parse_scheme
from anechain.bundle.spec import Attention, ModelSpec, Rope, matrices_of
from anechain.errors import RecipeError

SPEC = ModelSpec(
    family="qwen3", vocab_size=320, hidden_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_size=80,
    rms_eps=1e-6, attentions=(Attention("full", Rope(1e6)),), layer_attention=(0, 0), attention_scale=0.25,
    max_context=512, tied=True,
)  # fmt: skip


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "my.toml")
    return str(caught.value)


KNOWN = (
    "use fp16, int8 or int4 (with -blockN: one scale for N inputs), palette8, palette6 or palette4 (with -groupN: one "
    "table for N outputs), each but fp16 with +rankN if you like"
)
SCHEMES = {
    "fp16": FP16,
    "int8": Scheme(8),
    "int8-block32": Scheme(8, "block", 32),
    "int8-block1": Scheme(8, "block", 1),
    "int4": Scheme(4),
    "int4-block32": Scheme(4, "block", 32),
    "palette8": Scheme(8, "tensor", kind="palette"),
    "palette6-group16": Scheme(6, "group", 16, "palette"),
    "palette4": Scheme(4, "tensor", kind="palette"),
    "int8+rank16": Scheme(8, rank=16),
    "int4-block32+rank8": Scheme(4, "block", 32, rank=8),
    "palette4-group8+rank2": Scheme(4, "group", 8, "palette", 2),
}


@pytest.mark.parametrize(("text", "scheme"), SCHEMES.items())
def test_scheme_and_its_text_are_each_other(text: str, scheme: Scheme) -> None:
    assert parse_scheme(text) == scheme
    assert str(scheme) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "int5",
            "int8-block",
            "int8-block0",
            "int8-block-8",
            "int8-blockx",
            "INT8",
            "",
            "palette7",
            "palette8-block4",
        ),
        *("int8-group4", "int8+rank0", "int8+rank", "fp16+rank4", "int8\n"),
    ],
)
def test_unknown_scheme(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_scheme(text)
    assert str(caught.value) == (f"scheme {text!r} is not known: {KNOWN}.")


def test_first_matching_rule_wins_and_the_rest_stays_fp16() -> None:
    recipe = parse_recipe(
        """
        [[rule]]
        match = "layers.1.down"
        scheme = "fp16"
        [[rule]]
        match = "layers.*.down"
        scheme = "int8-block16"
        [[rule]]
        match = "layers.*"
        scheme = "int8"
        """,
        "mixed.toml",
    )
    assert (recipe.name, recipe.compute, recipe.layers_per_package) == ("mixed", "fp16", None)
    schemes = {name: str(recipe.scheme_for(name, 1)) for name in matrices_of(SPEC)}
    assert schemes["layers.1.down"] == "fp16"
    assert schemes["layers.0.down"] == "int8-block16"
    assert schemes["layers.1.q"] == schemes["layers.0.gate"] == "int8"
    assert schemes["head"] == schemes["embed"] == "fp16"
    recipe.check(SPEC)


def test_check_names_every_offender() -> None:
    rules = (Rule("layers.7.*", FP16), Rule("layers.*", Scheme(8, "block", 32)), Rule("heads", Scheme(8)))
    with pytest.raises(RecipeError) as caught:
        Recipe("mine", "fp16", rules).check(SPEC)
    assert str(caught.value) == (
        "recipe 'mine' cannot be applied to this model: pattern 'layers.7.*' matches no matrix; "
        "pattern 'heads' matches no matrix; layers.0.down has 80 inputs, which blocks of 32 do not divide; "
        "layers.1.down has 80 inputs, which blocks of 32 do not divide."
    )


def test_every_unknown_key_and_value_is_named_at_once() -> None:
    text = """
    colour = "red"
    compute = "bf16"
    layers_per_package = 0
    [[rule]]
    match = "head"
    scheme = "int5"
    [[rule]]
    matches = "embed"
    scheme = "int8"
    """
    assert refusal(text) == (
        "my.toml cannot be used: unknown key 'colour'; compute = 'bf16' (use \"fp16\" or \"fp32\"); "
        "layers_per_package = 0 (use a whole number of at least 1); "
        f"rule 1: scheme 'int5' is not known: {KNOWN}; "
        "unknown key 'matches' in rule 2; rule 2 has no 'match'."
    )


@pytest.mark.parametrize("value", ["true", "1.5", '"2"', "-1"])
def test_layers_per_package_is_a_whole_number(value: str) -> None:
    assert "(use a whole number of at least 1)" in refusal(f"layers_per_package = {value}")


def test_rule_that_is_no_list_of_tables() -> None:
    expected = "my.toml cannot be used: `rule` is not a list of tables (write [[rule]])."
    assert refusal('[rule]\nmatch = "head"\nscheme = "int8"') == expected
    assert refusal('rule = ["head"]') == expected


def test_text_that_is_not_toml() -> None:
    text = refusal("compute = fp16")
    assert text.startswith("my.toml is not valid TOML (") and text.endswith("): correct that line.")


def test_recipe_and_its_json_are_each_other() -> None:
    recipe = Recipe("mine", "fp32", (Rule("layers.*", Scheme(8, "block", 32)), Rule("head", Scheme(8))), 4)
    data = recipe.to_json()
    assert Recipe.from_json(data) == recipe
    assert data["rules"] == [{"match": "layers.*", "scheme": "int8-block32"}, {"match": "head", "scheme": "int8"}]


def test_shipped_recipes_load_by_name_and_fit_a_model() -> None:
    names = [p.name.removesuffix(".toml") for p in resources.files("anechain.recipes").iterdir() if ".toml" in p.name]
    assert {"fp16", "int8", "int8-block32", "int8-ffn-qkv-only", "int4-block32", "m8", "palette8"} <= set(names)
    for name in names:
        assert load_recipe(name).name == name
    assert load_recipe("fp16").rules == ()
    int8 = load_recipe("int8")
    int8.check(SPEC)
    assert {str(int8.scheme_for(name, 1)) for name in matrices_of(SPEC)} == {"int8"}
    some = load_recipe("int8-ffn-qkv-only")
    some.check(SPEC)
    left = [name for name in matrices_of(SPEC) if some.scheme_for(name, 1) == FP16]
    assert left == ["embed", "layers.0.o", "layers.1.o", "head"]
    for name in ("palette8", "int4-block32"):
        assert str(load_recipe(name).scheme_for("layers.1.up", 1)) == name
        assert load_recipe(name).scheme_for("head", 1) == FP16
    m8 = load_recipe("m8")
    assert (m8.compute, m8.layers_per_package) == ("fp32", 1)
    assert str(m8.scheme_for("layers.0.q", 1)) == "int8-block32" and m8.scheme_for("head", 1) == FP16


def test_rules_choose_by_layer_and_by_size() -> None:
    recipe = parse_recipe(
        """
        [[rule]]
        match = ["*.down", "*.up"]
        layers = [1]
        scheme = "palette6"
        [[rule]]
        match = "*"
        at_least = 5000
        at_most = 5120
        scheme = "int8"
        [[rule]]
        match = "*"
        at_most = 2048
        scheme = "int4"
        """,
        "sizes.toml",
    )
    recipe.check(SPEC)
    schemes = {name: str(recipe.scheme_for(name, o * i)) for name, (o, i) in matrices_of(SPEC).items()}
    assert schemes == {
        "embed": "fp16", "head": "fp16",  # 20 480
        **{f"layers.{i}.{n}": "fp16" for i in (0, 1) for n in ("q", "o")},  # 4 096
        **{f"layers.{i}.{n}": "int4" for i in (0, 1) for n in ("k", "v")},  # 2 048
        **{f"layers.{i}.{n}": "int8" for i in (0, 1) for n in ("gate", "up", "down")},  # 5 120
        "layers.1.down": "palette6", "layers.1.up": "palette6",
    }  # fmt: skip
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_check_knows_every_kind_of_scheme() -> None:
    rules = (
        Rule("embed", Scheme(4)), Rule("head", Scheme(8, "group", 48, "palette")), Rule("*.k", Scheme(8, rank=32)),
        Rule("*.q", FP16, layers=(2,)), Rule("*.q", FP16, at_least=9000, at_most=9999), Rule("*.o", Scheme(8)),
    )  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        Recipe("mine", "fp32", rules, calibration=Calibration(("gptq",))).check(SPEC)
    assert str(caught.value) == (
        "recipe 'mine' cannot be applied to this model: pattern '*.q' (layers 2) matches no matrix; "
        "pattern '*.q' (at_least 9000; at_most 9999) matches no matrix; "
        "embed is looked up row by row and cannot be int4 (use fp16, int8 or palette8); "
        "layers.0.k is 32 x 64, too small for a correction of rank 32; "
        "layers.1.k is 32 x 64, too small for a correction of rank 32; "
        'head has 320 outputs, which groups of 48 do not divide; calibration needs compute = "fp16".'
    )


def test_rules_and_calibration_that_make_no_sense() -> None:
    text = """
    [[rule]]
    match = []
    scheme = "int8"
    layers = ["0"]
    at_most = -1
    [calibration]
    methods = ["gptq", "magic"]
    sequences = -1
    colour = "red"
    """
    assert refusal(text) == (
        "my.toml cannot be used: match = [] in rule 1 (use a pattern or a list of patterns); "
        "layers = ['0'] in rule 1 (use a list of whole numbers, the first layer is 0); "
        "at_most = -1 in rule 1 (use a whole number of weights); unknown key 'colour' in calibration; "
        "methods = ['gptq', 'magic'] in calibration (use a list of clip, scales, gptq, drift, level, weigh); "
        "sequences = -1 in calibration (use a whole number of at least 0)."
    )
    assert (
        refusal("calibration = true") == "my.toml cannot be used: `calibration` is not a table (write [calibration])."
    )


def test_calibration_and_its_json_are_each_other() -> None:
    recipe = parse_recipe(
        '[calibration]\nmethods = ["gptq", "clip"]\nseed = 3\n[[rule]]\nmatch = "head"\nscheme = "int8"', "x.toml"
    )
    assert recipe.calibration == Calibration(("clip", "gptq"), seed=3)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert "calibration" not in load_recipe("int8").to_json()


def test_recipe_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('layers_per_package = 3\n[[rule]]\nmatch = "head"\nscheme = "int8"\n', encoding="utf-8")
    assert load_recipe(str(path)) == Recipe("mine", "fp16", (Rule("head", Scheme(8)),), 3)
    path.write_text('nmae = "x"', encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert str(caught.value) == f"{path} cannot be used: unknown key 'nmae'."


def test_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("int9")
    text = str(caught.value)
    assert text.startswith("recipe 'int9' is not known: use one of fp16, int4-block32, int8, int8-block32, ")
    assert text.endswith(", or the path of a .toml file.")
    path = tmp_path / "none.toml"
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(f"recipe {path} cannot be read (") and "check the path." in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(path))


def test_palettes_of_four_bits_are_asked_for_twice() -> None:
    """Field case Q9: beside a state they gave wrong answers or crashed; no recipe has them by accident."""
    schemes = {"q": "palette4", "k": "int8"}
    rules = "".join(f'[[rule]]\nmatch = "layers.*.{part}"\nscheme = "{name}"\n' for part, name in schemes.items())
    with pytest.raises(RecipeError) as refused:
        parse_recipe(rules, "four.toml")
    assert str(refused.value) == (
        "four.toml cannot be used: palette4 is reported to fail on Macs beside a state (use experimental = true)."
    )
    assert parse_recipe("experimental = true\n" + rules, "four.toml").rules[0].scheme == parse_scheme("palette4")
    assert parse_recipe(rules.replace("palette4", "palette6"), "six.toml").rules[0].scheme.bits == 6
    with pytest.raises(RecipeError, match=r"experimental = 'yes' \(use true or false\)"):
        parse_recipe("experimental = 'yes'\n" + rules, "four.toml")
