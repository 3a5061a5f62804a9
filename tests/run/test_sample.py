"""Choosing an id, against transformers' logits processors and against plain counting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anechain.errors import EngineError, RequestError
from anechain.run.sample import Sampler, Sampling, greedy, probabilities, sample
from tests.tolerances import PROBABILITY, SAMPLE_SIGMAS

# Distinct by at least a thousandth: the order of equal logits is another test's business.
LOGITS = st.lists(st.integers(-30_000, 30_000), min_size=2, max_size=40, unique=True).map(
    lambda whole: np.array(whole, np.float32) / 1000
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.7, 5.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
)


def theirs(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution that `generate` draws from, in float64."""
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.tensor(logits.astype(np.float64))[None]  # [1, V] f64
    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    for step in steps:
        scores = step(None, scores)
    return scores.softmax(-1)[0].numpy()


@given(logits=LOGITS, sampling=SAMPLINGS)
def test_probabilities_equal_transformers(logits: np.ndarray, sampling: Sampling) -> None:
    ours, expected = probabilities(logits, logits.size, sampling), theirs(logits, sampling)
    assert ours.shape == expected.shape and ours.dtype == np.float64
    assert (ours > 0).tolist() == (expected > 0).tolist()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=PROBABILITY)


def test_the_order_is_temperature_then_k_then_p() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # p on the whole distribution would keep 0.4 and 0.3 only (0.7 > 0.65); after k = 2 it is 4/7 < 0.65, so both stay.
    kept = probabilities(logits, 4, Sampling(1.0, top_k=2, top_p=0.56))
    np.testing.assert_allclose(kept, [1, 0, 0, 0], atol=PROBABILITY)  # 4/7 > 0.56; without k first 0.4 < 0.56 keeps two
    # At temperature 1/2 the same p is reached by the first id (16/30), at temperature 1 it takes two.
    assert (probabilities(logits, 4, Sampling(0.5, top_p=0.5)) > 0).tolist() == [True, False, False, False]
    assert (probabilities(logits, 4, Sampling(1.0, top_p=0.5)) > 0).tolist() == [True, True, False, False]


def test_ties() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0, 0.0], np.float32)
    assert greedy(logits, 5) == 1
    assert np.flatnonzero(probabilities(logits, 5, Sampling(1.0, top_k=2))).tolist() == [1, 2, 3]
    assert np.flatnonzero(probabilities(logits, 5, Sampling(1.0, top_p=0.5))).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, 5, Sampling(1.0, top_p=1e-9))).tolist() == [1]
    assert probabilities(np.zeros(2), 2, Sampling(1.0, top_p=0.5)).tolist() == [1.0, 0.0]  # p is reached exactly
    many = np.tile([0.0, 1.0], 100)  # each odd id has e / (100 e + 100)
    half = Sampling(1.0, top_p=49.5 * math.e / (100 * math.e + 100))
    assert np.flatnonzero(probabilities(many, 200, half)).tolist() == list(range(1, 100, 2))


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    logits = np.array([1.0, 2.0, 50.0, 60.0], np.float32)
    assert greedy(logits, 2) == 1 and greedy(logits, 3) == 2 and greedy(logits, 9) == 3
    weights = probabilities(logits, 2, Sampling(1.0))
    np.testing.assert_allclose(weights, [1 / (1 + math.e), math.e / (1 + math.e), 0, 0], atol=PROBABILITY)
    assert logits.tolist() == [1.0, 2.0, 50.0, 60.0]  # the caller's array is untouched


def test_masked_ids_are_never_drawn() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0], np.float32)
    sampler = Sampler(Sampling(1.0, seed=3), 4)
    assert {sampler.choose(logits) for _ in range(200)} == {1, 3}


def test_frequencies_follow_the_probabilities() -> None:
    logits, draws = np.array([0.0, 1.0, -1.0, 2.0, 0.5]), 20_000
    sampling = Sampling(0.8, top_k=4, seed=1)
    sampler = Sampler(sampling, 5)
    counts = np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=5)
    expected = probabilities(logits, 5, sampling)
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert counts[2] == 0 and np.count_nonzero(counts) == 4
    assert (np.abs(counts / draws - expected) <= SAMPLE_SIGMAS * deviation).all()


def test_a_seed_repeats_and_none_does_not() -> None:
    logits = np.zeros(1000, np.float32)

    def run(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed), 1000)
        return [sampler.choose(logits) for _ in range(20)]

    assert run(7) == run(7) != run(8)
    assert run(None) != run(None)
    assert len(set(run(7))) > 10


@pytest.mark.parametrize("temperature", [1e-300, 1e-5])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = np.array([29_000.0, 30_000.0, -30_000.0], np.float32)
    assert probabilities(logits, 3, Sampling(temperature)).tolist() == [0.0, 1.0, 0.0]


def test_temperature_zero_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    assert sample(np.array([0.0, 0.1]), 2, Sampling(), rng) == 1
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=2, top_p=0.5, seed=0)])
@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (
            [0.0, math.nan, 1.0, math.nan],
            r"2 logits that are NaN or infinite, the first \(nan\) for id 1: run `anechain",
        ),
        ([0.0, 0.0, math.inf], r"1 logits that are NaN or infinite, the first \(inf\) for id 2"),
        ([0.0, 1.0, 1.0, math.nan], "1 logits that are NaN"),  # also beyond the tokenizer: the engine is broken
        ([-math.inf] * 3, "all 3 logits are -inf, so there is no id to choose"),
        ([-math.inf, -math.inf, -math.inf, 5.0], "all 4 logits are -inf"),  # the only finite one is no id
        ([[0.0, 1.0]], r"logits of shape \[1, 2\] instead of \[V\]"),
    ],
)
def test_logits_that_cannot_be_trusted(logits: list, said: str, sampling: Sampling) -> None:
    with pytest.raises(EngineError, match=said):
        Sampler(sampling, 3).choose(np.array(logits, np.float32))


def test_values_out_of_range_are_all_named() -> None:
    with pytest.raises(RequestError) as caught:
        Sampling(temperature=-1, top_k=-2, top_p=0, seed=-1)
    assert str(caught.value) == (
        "sampling cannot use temperature -1 (a number from 0 up), top-k -2 (a whole number, 0 for all), "
        "top-p 0 (above 0, at most 1), seed -1 (a whole number from 0 up)."
    )
    for wrong in (
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": "1"},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"seed": 1.0},
    ):
        with pytest.raises(RequestError, match="sampling cannot use"):
            Sampling(**wrong)
    assert Sampling() == Sampling(0.0, 0, 1.0, None)
    Sampling(temperature=2, top_k=1, top_p=1, seed=0)
