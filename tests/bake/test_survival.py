"""What rounding leaves of an adapter, where it can be said beforehand: weights on the steps, between them, and D of a
known part of a step.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bake import survival as figures
from anechain.bake.adapter import Adapter
from anechain.bake.lora import Merged
from anechain.bake.survival import compare, summary, survival, warning
from anechain.bundle.recipe import FP16, Recipe, Rule, Scheme, load_recipe
from tests.bundle_maker import SPECS, TensorSource, tiny_source
from tests.tiny_lora import PREFIX, random, write_adapter
from tests.tolerances import SURVIVAL

INT8 = Recipe("int8", "fp16", (Rule("*", Scheme(8)),))
STEP = 2.0**-8
UP = "model.layers.0.mlp.up_proj"


@dataclass
class Made:
    """A base whose `layers.0.up` [96, 64] has steps of STEP in every row, and an adapter of `size` steps everywhere
    but in column 0, which holds the largest weight of each row."""

    between: bool  # the weights lie anywhere, not on the steps
    size: float
    source: Merged = field(init=False)

    def write(self, folder: Path) -> Merged:
        rng = np.random.default_rng(3)
        weight = rng.integers(-100, 100, (96, 64)) + (rng.uniform(-0.5, 0.5, (96, 64)) if self.between else 0)
        weight[:, 0] = 127
        base = tiny_source("llama")
        base = replace(base, tensors={**base.tensors, "layers.0.up": (weight * STEP).astype(np.float32)})
        a, b = rng.choice([-1.0, 1.0], (1, 64)), self.size * STEP * rng.choice([-1.0, 1.0], (96, 1))
        a[:, 0] = 0
        tensors = {f"{PREFIX}{UP}.lora_A.weight": a, f"{PREFIX}{UP}.lora_B.weight": b}
        return Merged(base, Adapter(write_adapter(folder / "adapter", tensors, r=1, lora_alpha=1)))


def figure(source: Merged, recipe: Recipe = INT8, name: str = "layers.0.up") -> tuple[float, float]:
    found = survival(source, recipe, ["layers.0.q", name])
    assert found.keys() == {name}, "figures are of what the adapter changes"
    return found[name]["share"], found[name]["projection"]


@pytest.mark.parametrize("size", [0.125, 0.25, 0.4375])
def test_less_than_half_a_step_is_lost_where_weights_lie_on_the_steps(size: float, tmp_path: Path) -> None:
    assert figure(Made(False, size).write(tmp_path)) == (0, 0)


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_whole_steps_survive(size: float, tmp_path: Path) -> None:
    assert figure(Made(False, size).write(tmp_path)) == (1, 1)


@pytest.mark.parametrize("size", [0.125, 0.25, 0.5])
def test_between_the_steps_a_part_of_a_step_is_that_share_and_all_of_it_on_average(size: float, tmp_path: Path) -> None:
    """A weight moves by a whole step with the probability `size`: C . D / |D|^2 = size / size, its square by size."""
    share, projection = figure(Made(True, size).write(tmp_path))
    assert abs(share - size) <= SURVIVAL and abs(projection - 1) <= SURVIVAL / size


def test_other_recipes(tmp_path: Path) -> None:
    source = Made(True, 0.25).write(tmp_path)
    assert figure(source, load_recipe("fp16"))[0] > 0.9
    assert figure(source, Recipe("wide", "fp32", ())) == (1, 1)
    block = figure(source, Recipe("block", "fp16", (Rule("*.up", Scheme(8, "block", 16)),)))
    assert figure(source)[0] < block[0] < 0.9, "smaller blocks have smaller steps"


def test_a_fraction_that_survives_only_where_it_is_large(tmp_path: Path) -> None:
    """On the steps, rows of 0.25 and of 1 step: half of the rows are lost, 1/17 of the energy."""
    source = Made(False, 1.0).write(tmp_path)
    key = f"{PREFIX}{UP}.lora_B.weight"
    b = source.adapter.read(key).copy()
    b[::2] /= 4
    write_adapter(tmp_path / "adapter", {key: b, key.replace("_B", "_A"): source.adapter.read(key.replace("_B", "_A"))},
                  r=1, lora_alpha=1)  # fmt: skip
    share, projection = figure(Merged(source.base, Adapter(tmp_path / "adapter")))
    assert share == projection == pytest.approx(16 / 17, abs=1e-6)


def ends(base: TensorSource, folder: Path, rows: int) -> Merged:
    """The base with another embedding of `rows` rows, of which few differ from its own."""
    table = np.concatenate([base.tensor("embed"), random("new", (8, 64))])[:rows]
    table[[5, 77]] += 0.001
    tensors = {f"{PREFIX}model.embed_tokens.weight": table, f"{PREFIX}lm_head.weight": table}
    return Merged(base, Adapter(write_adapter(folder / "adapter", tensors)))


@pytest.mark.parametrize("rows", [320, 328, 300])
def test_the_ends_of_a_vocabulary_that_may_be_resized(rows: int, tmp_path: Path) -> None:
    recipe = Recipe("mixed", "fp32", (Rule("head", Scheme(8)), Rule("embed", FP16)))
    source = ends(tiny_source("qwen3"), tmp_path, rows)
    assert source.spec.tied and source.changes.keys() == {"embed"}
    found = survival(source, recipe, ["embed", "head"])
    assert found["head"]["share"] < found["embed"]["share"] < 1, "the host's table is fp16 whatever computes"


def test_only_rows_that_change_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ends(tiny_source("qwen3"), tmp_path, 320)
    monkeypatch.setattr(figures, "MAX_ROWS", 2)
    seen = []
    compare(source, "embed", lambda rows: seen.append(rows) or rows)  # type: ignore[func-returns-value]
    assert np.array_equal(seen[0], source.tensor("embed")[[5, 77]])
    assert np.array_equal(seen[1], source.base_tensor("embed")[[5, 77]])
    monkeypatch.setattr(figures, "MAX_ROWS", 1)
    assert compare(source, "embed", lambda rows: rows) == {"share": 1, "projection": 1}


def test_a_delta_of_zero_has_no_figure(tmp_path: Path) -> None:
    source = Made(True, 0.0).write(tmp_path)
    assert "layers.0.up" in source.changes and survival(source, INT8, ["layers.0.up"]) == {}
    assert summary({}) is None and warning(None) is None


def test_the_summary_and_its_warning() -> None:
    found = summary({
        "layers.0.q": {"share": 0.75, "projection": 1.0}, "layers.1.q": {"share": 0.25, "projection": 0.5},
        "layers.2.q": {"share": 0.5, "projection": 0.9},
    })  # fmt: skip
    assert found == {
        "matrices": 3, "worst_matrix": "layers.1.q", "min_share": 0.25, "mean_share": 0.5, "min_projection": 0.5,
        "mean_projection": 0.8, "low": 1,
    }  # fmt: skip
    assert warning(found) == (
        "in 1 of 3 matrices rounding changes more than the adapter does: the adapter's share of the change is 0.50 on "
        "average and 0.25 in layers.1.q (1 would be all of it), and 0.80 of the adapter is there on average; a finer "
        "recipe keeps more"
    )
    assert warning(summary({"layers.0.q": {"share": 0.5, "projection": 1.0}})) is None


def test_every_family_of_sources_can_be_measured(tmp_path: Path) -> None:
    base = tiny_source(SPECS["llama"])
    a, b = random("a", (4, 64), 0.3), random("b", (32, 4), 0.3)
    key = f"{PREFIX}model.layers.2.self_attn.v_proj.lora_"
    source = Merged(base, Adapter(write_adapter(tmp_path / "a", {f"{key}A.weight": a, f"{key}B.weight": b})))
    share, projection = figure(source, name="layers.2.v")
    assert 0.9 < share < 1 and abs(projection - 1) < 0.1
