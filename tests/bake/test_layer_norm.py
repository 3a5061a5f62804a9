"""The recipe's other norm, layer_norm of [x, -x]: the same numbers, until |x| is too large for a square in fp16."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bake.package import make_head
from anechain.bundle.program import read_program
from anechain.bundle.recipe import Recipe, load_recipe, parse_recipe
from anechain.errors import RecipeError
from anechain.judge.lint import lint
from anechain.run.chain import Chain
from anechain.run.openvino import CpuEngine
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import deviation, make_bundle, tiny_source
from tests.tolerances import CHAIN_ORACLE

OTHER = Recipe("other-norm", "fp16", (), norm="layer_norm")
IDS = np.random.default_rng(4).integers(0, 320, 40)
MASSIVE = 29307.0  # what the residual stream of SmolLM2-135M reaches


def test_a_recipe_says_which_norm() -> None:
    recipe = parse_recipe('norm = "layer_norm"\n[[rule]]\nmatch = "*"\nscheme = "int8"\n', "x.toml")
    assert recipe.norm == "layer_norm" and Recipe.from_json(recipe.to_json()) == recipe
    plain = load_recipe("fp16")
    assert plain.norm == "max-scaled" and "norm" not in plain.to_json() and Recipe.from_json(plain.to_json()) == plain
    with pytest.raises(RecipeError) as caught:
        parse_recipe('norm = "batch"', "x.toml")
    assert str(caught.value) == "x.toml cannot be used: norm = 'batch' (use 'max-scaled' or 'layer_norm')."


@pytest.mark.parametrize("form", ["qwen3", "gemma3"])
def test_it_computes_the_same_and_lint_takes_it(form: str, tmp_path: Path) -> None:
    source = tiny_source(form)
    bundles = {r.norm: make_bundle(source, tmp_path / r.norm, r, cuts=(1, 2)) for r in (OTHER, load_recipe("fp16"))}
    chains = {norm: Chain(bundle, ReferenceEngine()) for norm, bundle in bundles.items()}
    said = {}
    for norm, chain in chains.items():
        session = chain.start()
        said[norm] = np.array([chain.feed(session, IDS[:35]), *(chain.feed(session, [i]) for i in IDS[35:])])
    assert deviation(said["layer_norm"], said["max-scaled"]) < CHAIN_ORACLE
    assert not np.array_equal(said["layer_norm"], said["max-scaled"])
    chain = Chain(bundles["layer_norm"], CpuEngine("exact"))
    assert deviation(chain.feed(chain.start(), IDS[:35])[None], said["layer_norm"][:1]) < CHAIN_ORACLE
    found = {f.rule for f in lint(bundles["layer_norm"].path).findings}
    assert not found & {"O1", "O2"} and found


def test_ops(tmp_path: Path) -> None:
    source = tiny_source("qwen3")
    make_head(source, source.spec, OTHER, tmp_path / "head.mlpackage")
    ops = Counter(op.type for op in read_program(tmp_path / "head.mlpackage").functions["decode"].ops)
    assert ops == Counter(transpose=2, mul=2, concat=1, layer_norm=1, split=1, conv=1)


def test_massive_activations_break_it_inside_and_the_default_not(tmp_path: Path) -> None:
    """Only where fp16 is also inside the op, which no engine on a CPU shows but the reference engine under stress."""
    source = tiny_source(replace(tiny_source("llama").spec, n_layers=1, layer_attention=(0,)))
    hidden = np.random.default_rng(1).standard_normal(64)
    hidden[7] = MASSIVE
    gain, head = source.tensor("final_norm"), source.tensor("head")
    exact = hidden / np.sqrt(np.mean(hidden**2) + source.spec.rms_eps) * gain @ head.T
    errors = {}
    for recipe in (OTHER, load_recipe("fp16")):
        path = tmp_path / f"{recipe.norm}.mlpackage"
        make_head(source, source.spec, recipe, path)
        for stress in (False, True):
            out = {"logits_0": np.zeros((1, 1, 1, 320), np.float16)}
            given = {"hidden": hidden.astype(np.float16).reshape(1, 1, 1, 64)}
            ReferenceEngine(stress).load([path]).step("decode", given, None, out)
            errors[recipe.norm, stress] = deviation(out["logits_0"][0, 0].astype(np.float64), exact[None])
    broken = errors.pop(("layer_norm", True))
    assert max(errors.values()) < CHAIN_ORACLE and broken > 0.9, (errors, broken)
