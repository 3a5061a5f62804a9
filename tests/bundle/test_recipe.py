"""Recipes: which rule wins, what is refused, and in which words."""

from importlib import resources
from pathlib import Path

import pytest

from anechain.bundle.recipe import FP16, Recipe, Rule, Scheme, load_recipe, parse_recipe, parse_scheme
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


SCHEMES = {
    "fp16": FP16,
    "int8": Scheme(8),
    "int8-block32": Scheme(8, "block", 32),
    "int8-block1": Scheme(8, "block", 1),
}


@pytest.mark.parametrize(("text", "scheme"), SCHEMES.items())
def test_scheme_and_its_text_are_each_other(text: str, scheme: Scheme) -> None:
    assert parse_scheme(text) == scheme
    assert str(scheme) == text


@pytest.mark.parametrize("text", ["int4", "int8-block", "int8-block0", "int8-block-8", "int8-blockx", "INT8", ""])
def test_unknown_scheme(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_scheme(text)
    assert str(caught.value) == (
        f"scheme {text!r} is not known: use fp16, int8 or int8-blockN, for example int8-block32."
    )


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
    schemes = {name: str(recipe.scheme_for(name)) for name in matrices_of(SPEC)}
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
        "rule 1: scheme 'int5' is not known: use fp16, int8 or int8-blockN, for example int8-block32; "
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
    assert {"fp16", "int8", "int8-block32", "m8"} <= set(names)
    for name in names:
        assert load_recipe(name).name == name
    assert load_recipe("fp16").rules == ()
    int8 = load_recipe("int8")
    int8.check(SPEC)
    assert {str(int8.scheme_for(name)) for name in matrices_of(SPEC)} == {"int8"}
    m8 = load_recipe("m8")
    assert (m8.compute, m8.layers_per_package) == ("fp32", 1)
    assert str(m8.scheme_for("layers.0.q")) == "int8-block32" and m8.scheme_for("head") == FP16


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
    assert text.startswith("recipe 'int9' is not known: use one of fp16, int8, int8-block32, m8")
    assert text.endswith(", or the path of a .toml file.")
    path = tmp_path / "none.toml"
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(f"recipe {path} cannot be read (") and "check the path." in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(str(path))
