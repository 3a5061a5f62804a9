"""The plan of a bake: what is decided, and what is refused, before anything is written."""

from dataclasses import replace
from typing import Any

import pytest

from anechain.bake import jobs
from anechain.bake.jobs import MAX_BYTES, MAX_LAYERS, make_plan
from anechain.bundle.manifest import HEAD
from anechain.bundle.recipe import Recipe, Rule, Scheme, load_recipe
from anechain.bundle.spec import matrices_of
from anechain.errors import RecipeError, RequestError
from tests.bundle_maker import SPECS, TensorSource, tiny_source, tokenizer_files

OPTIONS = {"context": 64, "prefill": 32, "per_package": 1}
FLAGS = ["--context", "64", "--prefill", "32", "--layers-per-package", "1"]
PACKAGES = ["block-000.mlpackage", "block-001.mlpackage", "block-002.mlpackage", HEAD]
FP16 = load_recipe("fp16")


def plan(source: TensorSource | str = "llama", recipe: Recipe = FP16, **changes: Any) -> jobs.Plan:
    options = {"context": 64, "prefill": 32, "target": "macOS15", "layers_per_package": None} | changes
    return make_plan(tiny_source(source) if isinstance(source, str) else source, recipe, **options)


def deep(n_layers: int, **changes: Any) -> TensorSource:
    """A source that is planned, and never read."""
    spec = replace(SPECS["llama"], n_layers=n_layers, layer_attention=(0,) * n_layers, **changes)
    return TensorSource(spec, {}, text_files=tokenizer_files())


def bounds(planned: jobs.Plan) -> list[tuple[int, int]]:
    return [(block.start, block.stop) for block in planned.blocks]


@pytest.mark.parametrize(
    ("layers", "cut"), [(28, [(0, 14), (14, 28)]), (30, [(0, 15), (15, 30)]), (15, [(0, 15)]), (1, [(0, 1)])]
)
def test_auto_makes_the_fewest_packages_of_at_most_15_layers(layers: int, cut: list[tuple[int, int]]) -> None:
    assert bounds(plan(deep(layers))) == cut


def test_auto_cuts_every_depth_evenly_and_completely() -> None:
    for layers in range(1, 100):
        cut = bounds(plan(deep(layers)))
        sizes = [stop - start for start, stop in cut]
        assert [i for start, stop in cut for i in range(start, stop)] == list(range(layers))
        assert len(sizes) == -(-layers // MAX_LAYERS)
        assert max(sizes) <= MAX_LAYERS and max(sizes) - min(sizes) <= 1


def wide(bytes_a_layer: int) -> dict[str, Any]:
    """Fields of a spec whose layers take about that many bytes in fp16, in their feed-forward."""
    return {"ffn_size": bytes_a_layer // (3 * 64 * 2)}


def package_bytes(planned: jobs.Plan) -> list[int]:
    return [planned.job_bytes(block.file) for block in planned.blocks]


@pytest.mark.parametrize(("layers", "megabytes", "packages"), [(10, 90, 1), (10, 100, 2), (10, 300, 4), (7, 500, 7)])
def test_auto_keeps_packages_under_950_megabytes(layers: int, megabytes: int, packages: int) -> None:
    planned = plan(deep(layers, **wide(megabytes * 10**6)))
    assert len(planned.blocks) == packages
    assert max(package_bytes(planned)) <= MAX_BYTES
    assert sum(package_bytes(planned)) == pytest.approx(layers * megabytes * 1e6, rel=1e-3)


def test_auto_counts_the_bytes_of_each_layer_not_their_mean() -> None:
    int8 = Recipe("half", "fp16", tuple(Rule(f"layers.{i}.*", Scheme(8)) for i in range(6, 12)))
    planned = plan(deep(12, **wide(180 * 10**6)), int8)  # 1 620 MB, of which the first half 1 080
    assert max(package_bytes(planned)) <= MAX_BYTES
    assert len(planned.blocks) == 3


def test_a_layer_that_is_too_large_has_a_package_alone() -> None:
    assert bounds(plan(deep(3, **wide(1200 * 10**6)))) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("n", "cut"),
    [(1, [(i, i + 1) for i in range(7)]), (2, [(0, 2), (2, 4), (4, 6), (6, 7)]), (5, [(0, 5), (5, 7)]), (99, [(0, 7)])],
)
def test_any_number_of_layers_a_package(n: int, cut: list[tuple[int, int]]) -> None:
    planned = plan(deep(7), layers_per_package=n)
    assert bounds(planned) == cut
    assert [b.file for b in planned.blocks] == [f"block-{i:03d}.mlpackage" for i in range(len(cut))]


def test_the_flag_wins_over_the_recipes_wish() -> None:
    m8 = load_recipe("m8")
    assert len(plan(recipe=m8).blocks) == 3
    assert len(plan(recipe=m8, layers_per_package=2).blocks) == 2


def test_jobs_are_all_parts_largest_first() -> None:
    planned = plan(layers_per_package=2)
    assert set(planned.jobs) == {"block-000.mlpackage", "block-001.mlpackage", HEAD, "embedding"}
    sizes = [planned.job_bytes(job) for job in planned.jobs]
    assert sizes == sorted(sizes, reverse=True)
    assert planned.weight_bytes == sum(sizes) == 2 * sum(o * i for o, i in matrices_of(planned.spec).values())


HEAD_INT8 = Recipe("head", "fp16", (Rule("head", Scheme(8)),))
EMBED_INT8 = Recipe("embed", "fp16", (Rule("embed", Scheme(8)),))


@pytest.mark.parametrize(
    ("form", "recipe", "shares"),
    [
        ("qwen3", FP16, True),  # tied
        ("qwen3", load_recipe("int8"), True),
        ("qwen3", HEAD_INT8, False),
        ("qwen3", EMBED_INT8, False),
        ("qwen3", load_recipe("m8"), False),  # its head is fp32
        ("llama", FP16, False),  # a head of its own
        ("llama", load_recipe("int8"), False),
    ],
)
def test_a_tied_table_is_stored_once_where_both_ends_have_one_form(form: str, recipe: Recipe, shares: bool) -> None:
    planned = plan(form, recipe)
    assert planned.shares_table is shares
    assert ("embedding" in planned.jobs) is not shares


def test_the_key_is_that_of_everything_that_decides_the_bytes() -> None:
    source = tiny_source("llama")
    same = plan(source).key
    assert plan(replace(source, ref="elsewhere")).key == same
    others = [
        plan(source, context=96),
        plan(source, prefill=64),
        plan(source, prefill=0),
        plan(source, layers_per_package=1),
        plan(source, HEAD_INT8),
        plan(source, Recipe("fp16", "fp32", ())),
        plan(tiny_source("llama", seed=1)),
        plan(replace(source, text_files=source.text_files | {"chat_template.jinja": b"{{ x }}"})),
        plan("llama-biases"),
    ]
    assert len({same, *(p.key for p in others)}) == 10


def test_versions_of_the_tools_decide_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan().key
    monkeypatch.setattr(jobs, "version", lambda name: "0")
    assert plan().key != before


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"context": 100}, ["--context 100 is not a multiple of 32 (use 128)"]),
        ({"context": 96, "prefill": 64}, ["--context 96 is not a multiple of 64 (use 128)"]),
        ({"context": 0}, ["--context 0 is not a multiple of 32 (use 32)"]),
        ({"context": -64}, ["--context -64 is not a multiple of 32 (use 32)"]),
        ({"context": 1024}, ["--context 1024 is more than the 512 positions that the model knows"]),
        ({"prefill": 33}, ["--prefill 33 is not 0 or a multiple of 32 (use 64)"]),
        ({"prefill": -32}, ["--prefill -32 is not 0 or a multiple of 32 (use 64)"]),
        ({"layers_per_package": 0}, ["--layers-per-package 0 is not a whole number of at least 1"]),
        ({"target": "iOS12"}, ["--target iOS12 is not known (use macOS15, iOS18, macOS26, iOS26)"]),
        (
            {"context": 1000, "prefill": 5, "layers_per_package": -1, "target": ""},
            [
                "--context 1000 is not a multiple of 32 (use 1024)",
                "--context 1000 is more than the 512 positions that the model knows",
                "--prefill 5 is not 0 or a multiple of 32 (use 64)",
                "--layers-per-package -1 is not a whole number of at least 1",
                "--target  is not known (use macOS15, iOS18, macOS26, iOS26)",
            ],
        ),
    ],
)
def test_options_that_cannot_be_baked_are_all_named(changes: dict[str, Any], faults: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        plan(**changes)
    assert str(caught.value) == f"this cannot be baked: {'; '.join(faults)}."


def test_a_checkpoint_without_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"tensors has no tokenizer\.json \(put it beside the weights\)"):
        plan(replace(tiny_source("llama"), text_files={}))


def test_a_recipe_that_does_not_fit() -> None:
    with pytest.raises(RecipeError, match=r"pattern 'layers\.9\.q' matches no matrix"):
        plan(recipe=Recipe("x", "fp16", (Rule("layers.9.q", Scheme(8)),)))
