"""Are tokens drawn from exactly the distribution that was asked for?"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.generate.sampling import draw as drawing
from engine.generate.sampling.adjust import Draw, Seen, adjusted
from engine.generate.sampling.chance import uniform
from engine.generate.sampling.draw import draw as draw_tokens
from engine.generate.sampling.pick import pick
from engine.request import Sampling

COUNT = 20_000


def draw(step: int = 0, choice: int = 0, **sampling: Any) -> Draw:
    return Draw(Sampling(**{"max_tokens": 1000, **sampling}), choice, step)


def tokens_of(scores: torch.Tensor, draws: list[Draw]) -> list[int | None]:
    return [None if picked is None else picked.token for picked in pick(scores, draws)]


def chance(one: Draw) -> float:
    return uniform(one.sampling.seed, one.choice, one.step)


def warped(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What transformers draws from: float32 [rows, vocab] to probabilities."""
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution_of_transformers(asked: dict[str, float]) -> None:
    logits = torch.tensor([[-2.0, 1.0, 0.5, 0.0, 2.0, -1.0, -0.5, -3.0]])
    draws = [draw(step, seed=11, **asked) for step in range(COUNT)]
    tokens = tokens_of(logits.expand(COUNT, -1), draws)
    found = np.bincount([token for token in tokens if token is not None], minlength=8)
    expected = warped(logits, draws[0].sampling)[0].numpy() * COUNT
    kept = expected > 0
    assert not found[~kept].any()
    chi_square = float(((found - expected)[kept] ** 2 / expected[kept]).sum())
    # Exceeded once in 1,000 by chance, by degrees of freedom.
    assert chi_square < {3: 16.3, 4: 18.5, 5: 20.5, 7: 24.3}[int(kept.sum()) - 1]


def reference(logits: list[float], sampling: Sampling, u: float) -> int:
    """One row, one token at a time."""
    best = max(logits)
    weights = [float(np.exp((score - best) / sampling.temperature)) for score in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    order = order[: sampling.top_k or len(order)]
    total, mass, kept = sum(weights[token] for token in order), 0.0, set()
    for token in order:
        if not kept or (mass < sampling.top_p * total and weights[token] >= sampling.min_p):
            kept.add(token)
        mass += weights[token]
    weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    below, aim = 0.0, u * sum(weights)
    for token, weight in enumerate(weights):
        below += weight
        if aim < below:
            return token
    return max(kept)


ROWS = st.lists(st.permutations([n / 8 for n in range(12)]), min_size=1, max_size=5)


@given(
    # Steps of 1/8 apart, so that no sum falls on a border by rounding alone.
    rows=ROWS,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.013, 0.3, 0.77, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 7, 12, 50]),
    min_p=st.sampled_from([0.0, 0.11, 0.93]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@pytest.mark.parametrize("near", [2, 5, drawing._NEAR])
@settings(max_examples=100, deadline=None)
def test_a_draw_equals_the_slow_obvious_one(
    near: int,
    rows: list[list[float]],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
) -> None:
    asked = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    draws = [draw(step=n, seed=seed, **asked) for n in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_NEAR", near)
        tokens = tokens_of(torch.tensor(rows), draws)
    for row, one, token in zip(rows, draws, tokens, strict=True):
        assert token == reference(row, one.sampling, chance(one))


@pytest.mark.parametrize(
    "asked", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 700, "top_p": 0.99}]
)
def test_a_cut_keeps_the_tokens_that_transformers_keeps(asked: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 3000, generator=generator) * torch.tensor(
        [[0.1], [1], [2], [3], [5], [9]]
    )
    sampling = Sampling(max_tokens=1, temperature=0.8, **asked)
    weights = torch.exp((scores - scores.amax(dim=-1, keepdim=True)) / 0.8)
    kept = drawing._likeliest(weights, [sampling] * 6) > 0
    expected = warped(scores, sampling) > 0
    # Sums in another order may put the token at the very border on its other side.
    assert int((kept ^ expected).sum()) <= 6 if "top_p" in asked else torch.equal(kept, expected)


@pytest.mark.parametrize("flat", [0.1, 1.0, 3.0, 9.0])
def test_a_cut_of_a_whole_vocabulary_equals_that_of_sorted_rows(flat: float) -> None:
    generator = torch.Generator().manual_seed(6)
    scores = flat * torch.randn(6, 49_152, generator=generator)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    asked = [
        {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 20_000, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.6}, {"top_p": 0.95, "min_p": 0.01},
    ]  # fmt: skip
    sampling = [Sampling(max_tokens=1, **each) for each in asked]
    found = drawing._likeliest(weights, sampling)
    for row, one in enumerate(sampling):
        ordered, ids = weights[row].double().sort(descending=True, stable=True)
        ordered, ids = ordered[: one.top_k or None], ids[: one.top_k or None]
        before = ordered.cumsum(0) - ordered
        kept = ids[(before < one.top_p * ordered.sum()) & (ordered >= one.min_p)]
        # Equals stay together.
        expected = torch.where(weights[row] >= weights[row, kept[-1]], weights[row], 0)
        assert torch.equal(found[row], expected)


def test_the_last_of_the_mass_is_a_token_that_may_be_drawn() -> None:
    scores = torch.full((1, 8), -200.0)
    scores[0, 2], scores[0, 5] = 0.0, -1.0
    sampling = Sampling(max_tokens=1, top_k=2)
    assert draw_tokens(scores, [sampling], [1.0 - 2**-53]) == [5]
    assert draw_tokens(scores, [sampling], [0.0]) == [2]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.5},
    {"min_p": 0.1, "logprobs": 3},
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": ((3, 5.0), (9, -100.0)), "min_tokens": 4},
]


def mixed(count: int) -> list[Draw]:
    draws = []
    for n in range(count):
        sampling = Sampling(**{"max_tokens": 9, "seed": 9, **MIXED[n % len(MIXED)]})
        seen = Seen.of((1, 2, 3, 2), sampling)
        for token in (5, 5, n) if seen is not None else ():
            seen.add(token)
        draws.append(Draw(sampling, n // 3, n % 3, ends=(0,), seen=seen))
    return draws


def test_neighbours_change_no_draw() -> None:
    torch.manual_seed(0)
    scores = torch.randn(48, 2000)
    draws = mixed(48)
    together = pick(scores, draws)
    assert together == [pick(scores[n : n + 1], draws[n : n + 1])[0] for n in range(48)]
    assert together == pick(scores, mixed(48))  # a retry draws the same
    assert len({picked.token for picked in together if picked}) > 20


def test_seed_choice_and_step_each_give_other_numbers() -> None:
    numbers = {
        uniform(seed, choice, step)
        for seed in (-1, 0, 1, 2**40)
        for choice in range(3)
        for step in range(3)
    }
    assert len(numbers) == 36
    assert all(0 <= number < 1 for number in numbers)


def test_a_temperature_near_zero_is_greedy() -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 30) * 50
    greedy = tokens_of(scores, [draw(temperature=0.0)] * 4)
    assert tokens_of(scores, [draw(temperature=1e-300)] * 4) == greedy
    assert greedy == scores.argmax(dim=-1).tolist()


def test_scores_that_are_not_finite_give_no_token() -> None:
    scores = torch.zeros(5, 4)
    scores[0, 1] = float("nan")
    scores[1, 2] = float("inf")
    scores[2] = float("-inf")
    scores[3, :3] = float("-inf")  # a mask is no fault
    tokens = tokens_of(scores, [draw(), draw(temperature=0.0), draw(), draw(), draw()])
    assert tokens[:4] == [None, None, None, 3]
    assert tokens[4] is not None


def test_not_finite_stays_not_finite_however_scores_are_changed() -> None:
    scores = torch.zeros(1, 4)
    scores[0, 1] = float("nan")
    assert pick(scores, [draw(logit_bias=((1, 5.0),), logprobs=1)]) == [None]


def seen_of(prompt: tuple[int, ...], made: tuple[int, ...], **asked: Any) -> Draw:
    sampling = Sampling(max_tokens=100, **asked)
    seen = Seen.of(prompt, sampling)
    assert seen is not None
    for token in made:
        seen.add(token)
    return Draw(sampling, 0, len(made), seen=seen)


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    torch.manual_seed(2)
    scores = torch.randn(3, 40)
    texts = [((1, 2, 2), (7, 7)), ((3,), ()), ((4, 5), (4, 39))]
    for penalty in (0.6, 1.4):
        found = adjusted(
            scores, [seen_of(prompt, made, repetition_penalty=penalty) for prompt, made in texts]
        )
        for row, (prompt, made) in enumerate(texts):
            expected = RepetitionPenaltyLogitsProcessor(penalty)(
                torch.tensor([[*prompt, *made]]), scores[row : row + 1].clone()
            )
            torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=0)


def test_frequency_and_presence_count_the_answer_and_not_the_prompt() -> None:
    scores = torch.zeros(2, 6)
    found = adjusted(
        scores,
        [
            seen_of((1, 1, 1), (2, 3, 2), frequency_penalty=0.5, presence_penalty=1.0),
            seen_of((1,), (), frequency_penalty=0.5),
        ],
    )
    assert found.tolist() == [[0, 0, -2.0, -1.5, 0, 0], [0] * 6]
    assert not scores.any()  # what the model said stays as it was


def test_a_bias_is_that_of_transformers() -> None:
    torch.manual_seed(3)
    scores = torch.randn(1, 20)
    bias = ((4, 2.5), (11, -100.0))
    expected = SequenceBiasLogitsProcessor({(token,): by for token, by in bias})(
        torch.tensor([[1]]), scores.clone()
    )
    torch.testing.assert_close(adjusted(scores, [draw(logit_bias=bias)]), expected)


def test_no_answer_ends_before_its_least_length() -> None:
    scores = torch.tensor([[9.0, 1.0, 8.0, 0.0]])
    for step, token in [(0, 1), (2, 1), (3, 0)]:
        one = Draw(Sampling(max_tokens=9, temperature=0.0, min_tokens=3), 0, step, ends=(0, 2))
        assert tokens_of(scores, [one]) == [token]


def test_log_probabilities_are_of_the_scores_as_they_were() -> None:
    torch.manual_seed(4)
    scores = torch.randn(2, 30) * 3
    asked = {"logprobs": 4, "logit_bias": ((7, 100.0),), "temperature": 0.3, "candidates": (7, 2)}
    expected = torch.log_softmax(scores.double(), dim=-1)
    for row, picked in enumerate(pick(scores, [draw(**asked), draw(step=1, **asked)])):
        assert picked is not None
        assert picked.logprob is not None
        assert picked.token == picked.logprob.token == 7
        assert picked.logprob.logprob == pytest.approx(float(expected[row, 7]), abs=1e-5)
        values, ids = expected[row].topk(4)
        assert [token for token, _ in picked.logprob.top] == ids.tolist()
        assert [each for _, each in picked.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
        first = expected[row, [7, 2]].tolist() if row == 0 else []
        assert picked.candidates == pytest.approx(first, abs=1e-5)
    [none] = pick(scores[:1], [draw(logprobs=0)])
    assert none is not None
    assert none.logprob is not None
    assert none.logprob.top == ()
