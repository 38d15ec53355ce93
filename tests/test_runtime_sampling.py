"""Sampling: exact candidate sets, statistics against the analytic distribution, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plugins.errors import UserError
from runtime.sampling import Sampler, SamplingParams, candidates, logprob

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def nucleus(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token -> probability, by the definition: sort, cut, renormalise."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[: top_k or None]
    weight = {token: math.exp((float(logits[token]) - float(logits[order[0]])) / temperature) for token in order}
    total, kept, mass = sum(weight.values()), {}, 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept[token] = weight[token]
        mass += weight[token]
    return {token: value / sum(kept.values()) for token, value in kept.items()}


@pytest.mark.parametrize("top_k", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.64, 0.3, 1e-9])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_candidates_are_the_definition_of_top_k_and_top_p(top_k: int, top_p: float, temperature: float) -> None:
    rng = np.random.default_rng(1)
    for logits in (LOGITS, rng.normal(size=300).astype(np.float32), np.zeros(6, np.float32)):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        tokens, weights = candidates(logits, params)
        expected = nucleus(logits, temperature, top_k, top_p)
        assert tokens.tolist() == list(expected)
        np.testing.assert_allclose(weights / weights.sum(), list(expected.values()), rtol=1e-9)


def test_drawn_frequencies_match_the_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
    sampler, expected, count = Sampler(params), nucleus(LOGITS, 0.7, 0, 0.9), 20_000
    drawn = np.bincount([sampler(LOGITS) for _ in range(count)], minlength=5) / count
    for token in range(5):
        probability = expected.get(token, 0.0)
        assert abs(drawn[token] - probability) <= 4.5 * math.sqrt(probability * (1 - probability) / count)


def test_greedy_takes_the_largest_and_the_lower_of_a_tie() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler(LOGITS) == 1
    assert sampler(np.array([0, 2, 2, 1], np.float32)) == 1


def test_a_seed_fixes_the_draws_and_the_index_separates_sequences() -> None:
    params = SamplingParams(temperature=1.0, seed=7)

    def draws(params: SamplingParams, index: int) -> list[int]:
        sampler = Sampler(params, index)
        return [sampler(LOGITS) for _ in range(50)]

    assert draws(params, 0) == draws(params, 0)
    assert draws(params, 0) != draws(params, 1)
    assert draws(params, 0) != draws(SamplingParams(temperature=1.0, seed=8), 0)
    unseeded = SamplingParams(temperature=1.0)
    assert draws(unseeded, 0) != draws(unseeded, 0)


def test_extreme_logits_neither_overflow_nor_pick_the_impossible() -> None:
    logits = np.array([-np.inf, 3e38, -3e38, 3e38], np.float32)
    sampler = Sampler(SamplingParams(temperature=1e-3, seed=0))
    assert {sampler(logits) for _ in range(100)} == {1, 3}


def test_logprob_is_that_of_the_softmax() -> None:
    assert logprob(LOGITS, 3) == pytest.approx(math.log(0.25), abs=1e-6)
    assert logprob(LOGITS + 1000, 0) == pytest.approx(math.log(0.05), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("a", "")}, "stop string is empty"),
    ],
)
def test_impossible_parameters_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        SamplingParams(**options)


def test_a_single_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
