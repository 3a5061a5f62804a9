"""Calibrated rounding of whole models: what is moved changes nothing, what is rounded costs less, a bake repeats."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anechain.bake.jobs import Plan, make_plan
from anechain.bundle.footprint import footprint
from anechain.bundle.manifest import open_bundle
from anechain.bundle.recipe import Calibration, Recipe, Rule, parse_recipe, parse_scheme
from anechain.bundle.rounded import Rounded, save_rounded
from anechain.bundle.stored import Corrected, Stored, compress, dense
from anechain.errors import BundleError, RecipeError
from anechain.judge import prepare, rounding
from anechain.judge.calibration import BEGINNINGS, QUESTIONS, calibration_set, calibration_text
from anechain.judge.oracle import Oracle, rotate, rotation
from anechain.judge.prepare import with_rounding
from anechain.judge.prompts import CHAT, M8, SENTENCES, STRICT
from anechain.judge.rounding import RoundedSource, round_model
from anechain.run.chain import Chain
from anechain.run.reference import ReferenceEngine
from tests.bundle_maker import SPECS, TensorSource, bake_here, deviation, tiny_source
from tests.tolerances import ENGINE_DEVIATION, MOVED_DEVIATION

RNG = np.random.default_rng(8)


def tokens(source: TensorSource, count: int, length: int) -> list[np.ndarray]:
    return [RNG.integers(0, source.spec.vocab_size, length).astype(np.int32) for _ in range(count)]


def recipe(scheme: str, *methods: str, head: str = "") -> Recipe:
    rules = [Rule("layers.*", parse_scheme(scheme))] if scheme else []
    rules += [Rule("head", parse_scheme(head))] if head else []
    return Recipe("mine", "fp16", tuple(rules), calibration=Calibration(methods, 4, 24))


def logits(source: TensorSource | RoundedSource, sequences: list[np.ndarray]) -> np.ndarray:
    oracle = Oracle(source)
    return np.concatenate([oracle.logits(rows) for rows in oracle.forward(sequences)])


@pytest.mark.parametrize("family", SPECS)
def test_moving_scale_alone_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matrices that are not rounded at all, the model is the same after everything was moved."""
    source = tiny_source(family)
    seen = []

    def as_they_are(
        weight: np.ndarray, moment: np.ndarray, scheme: object, methods: object, name: str, level: object
    ) -> np.ndarray:
        seen.append(name)
        return weight

    monkeypatch.setattr(rounding, "round_matrix", as_they_are)
    mine = recipe("int8", "scales", head="int8")
    moved = round_model(source, source.spec, mine, tokens(source, 6, 40))
    factors = dense(moved["layers.1.ffn_norm"]).astype(np.float32) / source.tensor("layers.1.ffn_norm")
    assert np.ptp(factors) > 0.1 and np.ptp(dense(moved["final_norm"]) / source.tensor("final_norm")) > 0.1
    change = np.abs(dense(moved["layers.1.v"]).astype(np.float32) / source.tensor("layers.1.v") - 1)
    assert change.max() > 0.05 and len(seen) == 7 * source.spec.n_layers + 1
    test = tokens(source, 3, 20)
    assert deviation(logits(RoundedSource(source, source.spec, moved), test), logits(source, test)) < MOVED_DEVIATION


def test_each_method_costs_less_than_the_one_before() -> None:
    source = tiny_source("llama")
    calibration, test = tokens(source, 24, 60), tokens(source, 4, 30)
    wanted = logits(source, test)
    costs = []
    for scheme, methods in (
        ("int8", ()), ("int8", ("gptq",)), ("int8", ("scales", "gptq")), ("int8+rank8", ("scales", "gptq")),
    ):  # fmt: skip
        tensors = round_model(source, source.spec, recipe(scheme, *methods), calibration)
        costs.append(float(np.mean((logits(RoundedSource(source, source.spec, tensors), test) - wanted) ** 2)))
    assert costs == sorted(costs, reverse=True) and costs[-1] < 0.5 * costs[0]


def test_drift_makes_up_for_an_earlier_matrix() -> None:
    """The first layer's feed-forward is ruined, and what comes after it stays fine enough to be changed freely."""
    source = tiny_source("llama")
    calibration, test = tokens(source, 40, 60), tokens(source, 4, 30)
    wanted = logits(source, test)
    rules = (Rule("layers.0.down", parse_scheme("int4")), Rule("layers.2.*", parse_scheme("int8")))
    costs = []
    for methods in (("gptq",), ("gptq", "drift")):
        mine = Recipe("mine", "fp16", rules, calibration=Calibration(methods))
        tensors = round_model(source, source.spec, mine, calibration)
        assert ("layers.1.q" in tensors) == ("drift" in methods)
        costs.append(float(np.mean((logits(RoundedSource(source, source.spec, tensors), test) - wanted) ** 2)))
    assert costs[1] < 0.97 * costs[0]


def test_what_writes_to_the_stream_makes_up_for_what_the_stream_has_lost() -> None:
    """One layer is ruined; what the next one writes brings the stream nearer to the original's."""
    source = tiny_source("llama")
    rng = np.random.default_rng(3)
    calibration = [rng.integers(0, source.spec.vocab_size, 60).astype(np.int32) for _ in range(40)]
    mine = Recipe("mine", "fp16", (Rule("layers.0.down", parse_scheme("int4")),), calibration=Calibration(("drift",)))
    tensors = round_model(source, source.spec, mine, calibration)

    def streams(of: TensorSource | RoundedSource) -> list[np.ndarray]:
        kept: list[np.ndarray] = []
        Oracle(of).forward(calibration, record=lambda _, rows: kept.append(np.concatenate(rows)))
        return kept  # [N, H] on entering each layer

    exact = streams(source)[2]
    ruined = {name: tensors[name] for name in ("layers.0.down",)}
    lost, left = (
        float(np.mean((streams(RoundedSource(source, source.spec, kept))[2] - exact) ** 2))
        for kept in (ruined, tensors)
    )
    assert left < 0.61 * lost  # 0.58 here; 0.65 where each matrix makes up for its own results alone


@pytest.mark.parametrize(
    ("family", "weighed"), [("qwen3", False), ("qwen3", True), ("mistral", True), ("gemma3", True), ("qwen2", True)]
)
def test_statistics_are_those_of_the_rounded_chain(family: str, weighed: bool) -> None:
    source, seen = tiny_source(family), {}
    methods = ("gptq", "weigh") if weighed else ("gptq",)
    calibration = tokens(source, 5, 30)

    class Look:
        def matrix(self, name: str, weight: np.ndarray, moment: np.ndarray) -> None:
            seen[name] = moment

        def rows(self, name: str, factors: np.ndarray) -> None:
            raise AssertionError("nothing is moved here")

    tensors = round_model(source, source.spec, recipe("int4", *methods), calibration, look=Look())
    entering: dict[str, np.ndarray] = {}

    class Watching(Oracle):
        def _linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
            entering.setdefault(f"layers.{layer}.{name}", x)
            return super()._linear(layer, name, x)

    Watching(RoundedSource(source, source.spec, tensors)).forward(calibration)
    assert set(seen) == set(entering) and len(seen) == 21
    for name, x in entering.items():
        layer, part = int(name.split(".")[1]), name.rpartition(".")[2]
        match part if weighed else "":
            case "" | "q" | "k":
                power = x.T @ x
            case "v":
                costs, _ = costs_after(source, calibration, layer)
                mixed = shares(source, calibration, layer) @ x  # [heads, N, I]
                power = np.einsum("hni,n,hnj->ij", mixed, costs, mixed)
            case _:
                after_o, after_down = costs_after(source, calibration, layer)
                power = x.T @ (x * (after_o if part == "o" else after_down)[:, None])
        mine = seen[name] / np.trace(seen[name])
        np.testing.assert_allclose(mine, power / np.trace(power), rtol=1e-3, atol=1e-4 * np.abs(mine).max())


def costs_after(source: TensorSource, sequences: list[np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """One over the mean square of the original's stream after the attention of `layer`, and after its feed-forward, [N]
    each; with a norm between, one over that of what the norm is given, too.
    """
    streams: list[np.ndarray] = []
    said: dict[str, np.ndarray] = {}

    class Hearing(Oracle):
        def _ffn(self, at: int, x: np.ndarray) -> np.ndarray:
            streams.append(x)
            return super()._ffn(at, x)

        def _linear(self, at: int, name: str, x: np.ndarray) -> np.ndarray:
            y = super()._linear(at, name, x)
            if at == layer:
                said[name] = y
            return y

    entering: list[np.ndarray] = []
    Hearing(source).forward(sequences, record=lambda _, rows: entering.append(np.concatenate(rows)))
    costs = [1 / (after**2).mean(axis=1) for after in (streams[layer], entering[layer + 1])]
    if source.spec.sandwich_norms:
        costs = [cost / (said[part] ** 2).mean(axis=1) for cost, part in zip(costs, ("o", "down"), strict=True)]
    return costs[0], costs[1]


def shares(source: TensorSource, sequences: list[np.ndarray], layer: int) -> np.ndarray:
    """How much each position looks at each other one, [heads, N, N], by attention of values that are unit vectors."""
    spec = source.spec
    oracle, found = Oracle(source), []
    entering: list[list[np.ndarray]] = []
    oracle.forward(sequences, record=lambda _, rows: entering.append(list(rows)))
    for rows in entering[layer]:
        h = oracle._norm(layer, "attn_norm", rows)
        q = oracle._linear(layer, "q", h).reshape(len(h), -1, spec.head_dim)
        k = oracle._linear(layer, "k", h).reshape(len(h), -1, spec.head_dim)
        if spec.qk_norm:
            q, k = oracle._norm(layer, "q_norm", q), oracle._norm(layer, "k_norm", k)
        turn = rotation(spec.attentions[spec.layer_attention[layer]].rope, spec.head_dim, np.arange(len(h)))
        q, k = rotate(q, *turn), rotate(k, *turn)
        k = np.repeat(k, spec.n_heads // spec.n_kv_heads, axis=1)
        scores = np.einsum("nhd,mhd->hnm", q, k) * spec.attention_scale
        scores += np.triu(np.full((len(h), len(h)), -np.inf), 1)
        if (window := spec.attentions[spec.layer_attention[layer]].window) is not None:
            scores += np.tril(np.full((len(h), len(h)), -np.inf), -window)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    total = sum(map(len, sequences))
    whole, at = np.zeros((spec.n_heads, total, total)), 0
    for one in found:
        whole[:, at : at + one.shape[1], at : at + one.shape[1]] = one
        at += one.shape[1]
    return whole


# -- the text ----------------------------------------------------------------------------------------------------------


def test_none_of_the_gates_prompts_is_in_the_calibration() -> None:
    said = " ".join([calibration_text(), *BEGINNINGS, *QUESTIONS])
    flat = " ".join(said.lower().split())
    for prompt in (*M8, *STRICT, *CHAT, *SENTENCES):
        words = prompt.lower().split()
        for start in range(max(1, len(words) - 4)):
            piece = " ".join(words[start : start + 5])
            assert len(words) < 3 or piece not in flat, f"{piece!r} of the gate's {prompt!r} is calibrated on"


def test_calibration_set_is_the_text_and_the_models_own_words() -> None:
    source = tiny_source("llama")
    encode = lambda text: [ord(c) % 250 for c in text]  # noqa: E731
    made = calibration_set(source, Calibration(("gptq",), 3, 20, 0), 250, encode)
    again, other = (calibration_set(source, Calibration(("gptq",), 3, 20, seed), 250, encode) for seed in (0, 1))
    assert made.sha256 == again.sha256 != other.sha256
    assert sum(map(len, made.tokens[:-3])) == len(encode(calibration_text())) and made.size == sum(
        map(len, made.tokens)
    )
    oracle = Oracle(source)
    for own, start in zip(made.tokens[-3:], BEGINNINGS, strict=False):
        assert len(own) == 20 and own[: len(start)].tolist() == encode(start) and own.max() < 250
        ranks = (-oracle.logits(oracle.forward([own])[0])[:, :250]).argsort(axis=1).argsort(axis=1)
        drawn = ranks[np.arange(len(start) - 1, 19), own[len(start) :]]
        assert drawn.max() < 50 and np.unique(drawn).size > 2  # drawn, not the likeliest each time


# -- the file, and a bake with it --------------------------------------------------------------------------------------


def test_rounded_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    weight = RNG.standard_normal((16, 32)).astype(np.float32)
    schemes = ("int8", "int4-block16", "palette6-group4", "int8+rank2", "palette8+rank1")
    tensors: dict[str, Stored] = {f"layers.0.{s}": compress(weight, parse_scheme(s)) for s in schemes}
    tensors["final_norm"] = weight[0].astype(np.float16)
    paths = [tmp_path / name for name in ("a.npz", "b.npz")]
    for path in paths:
        save_rounded(path, tensors, {"tokens": 7})
    assert paths[0].read_bytes() == paths[1].read_bytes() and {p.name for p in tmp_path.iterdir()} == {"a.npz", "b.npz"}
    back = Rounded(paths[0])
    assert back.names == set(tensors) and back.about["tokens"] == 7 and "layers.0.q" not in back
    for name, stored in tensors.items():
        found = back.tensor(name)
        assert type(found) is type(stored)
        np.testing.assert_array_equal(dense(found), dense(stored))
        if isinstance(stored, Corrected):
            assert isinstance(found, Corrected) and found.base.bits == stored.base.bits


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "rounded.npz"
    for content in (b"", b"PK nothing"):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"rounded\.npz cannot be read \(.*\): delete the file and bake again\."):
            Rounded(path)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TensorSource, Plan]:
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
    source = tiny_source("gemma3")
    mine = parse_recipe(
        """
        [calibration]
        methods = ["scales", "gptq", "drift"]
        sequences = 4
        length = 24
        [[rule]]
        match = "layers.0.q"
        scheme = "fp16"
        [[rule]]
        match = "layers.*.down"
        scheme = "int8+rank4"
        [[rule]]
        match = ["layers.*", "head"]
        scheme = "int8"
        """,
        "mine.toml",
    )
    return source, make_plan(source, mine, 64, 32, "macOS15", 3)


def test_a_calibrated_bake_holds_the_rounded_weights_and_repeats(
    planned: tuple[TensorSource, Plan], tmp_path: Path
) -> None:
    source, bare = planned
    plan = with_rounding(bare, source)
    assert plan.rounded_file is not None and plan.calibration is not None
    rounded = Rounded(Path(plan.rounded_file))
    bundle = bake_here(source, plan, tmp_path / "one")
    kept = open_bundle(bundle.path).calibration
    assert kept == plan.calibration
    assert kept["rounded_sha256"] == hashlib.sha256(Path(plan.rounded_file).read_bytes()).hexdigest()
    with_rounding(bare, source)  # from the cache
    Path(plan.rounded_file).unlink()
    again = with_rounding(bare, source)
    assert again.key == plan.key
    other = bake_here(source, again, tmp_path / "two")
    assert {n: r.sha256 for n, r in bundle.files.items()} == {n: r.sha256 for n, r in other.files.items()}
    assert with_rounding(replace(bare, text_sha256="another"), source).rounded_file != plan.rounded_file

    tensors = {name: rounded.tensor(name) for name in rounded.names}
    ids = RNG.integers(0, source.spec.vocab_size, 40)
    chain = Chain(bundle, ReferenceEngine(False))
    got = chain.feed(chain.start(), ids)
    wanted = logits(RoundedSource(source, plan.spec, tensors), [ids])[-1:]
    assert deviation(got[None], wanted) < ENGINE_DEVIATION
    assert deviation(got[None], logits(source, [ids])[-1:]) < 0.2


def test_a_calibrated_recipe_needs_its_rounded_weights(planned: tuple[TensorSource, Plan], tmp_path: Path) -> None:
    from anechain.bake.jobs import bake

    source, plan = planned
    with pytest.raises(RecipeError) as caught:
        bake(source, plan, tmp_path / "none", 1)
    assert str(caught.value) == "recipe 'mine' is calibrated, and this bake was given no rounded weights."
    assert not (tmp_path / "none").exists()


def test_weights_that_were_rounded_for_another_recipe(planned: tuple[TensorSource, Plan], tmp_path: Path) -> None:
    source, plan = planned
    rounded = with_rounding(plan, source)
    other = replace(plan.recipe, rules=(Rule("layers.*", parse_scheme("int4")), Rule("head", parse_scheme("int8"))))
    with pytest.raises(RecipeError, match=r"layers\.0\.q was rounded beforehand as fp16 \[\d+, 64\]; layers\.0\.k was"):
        bake_here(source, replace(rounded, recipe=other), tmp_path / "other")


def test_weights_that_another_algorithm_rounded_are_not_used(
    planned: tuple[TensorSource, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, plan = planned
    kept = with_rounding(plan, source).rounded_file
    assert with_rounding(plan, source).rounded_file == kept
    monkeypatch.setattr(prepare, "ALGORITHM", prepare.ALGORITHM + 1)
    assert with_rounding(plan, source).rounded_file != kept


def test_footprint_counts_what_the_model_stores() -> None:
    spec = SPECS["qwen3"]  # tied
    plain = footprint(spec, Recipe("fp16", "fp16", ()))
    assert plain.share == 1 and plain.eight_bit_share == 0 and plain.left_bytes == plain.bytes
    blocks = footprint(spec, recipe("int8"))
    assert blocks.left == ("embed",) and blocks.eight_bit_share == 1 and 0.5 < blocks.share < 1
    assert blocks.note == f"embed stays fp16: {blocks.left_bytes / blocks.bytes:.1%} of the bytes"
    apart = footprint(spec, recipe("int8", head="int8"))
    table = spec.vocab_size * spec.hidden_size
    assert apart.bytes - blocks.bytes == table + 2 * spec.vocab_size and apart.fp16_bytes == plain.bytes
    ranked = footprint(spec, recipe("int8+rank4"))
    assert 0.5 < ranked.eight_bit_share < 1 and ranked.bytes > blocks.bytes
    everything = footprint(spec, Recipe("all", "fp16", (Rule("*", parse_scheme("int8")),)))
    assert everything.note == "no matrix stays fp16" and everything.share < 0.52
