"""Are tokens drawn from exactly the distribution that was asked for?"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generate.sampler import Draw, pick, uniform
from engine.request import Sampling


def draw(step: int = 0, choice: int = 0, **sampling: float) -> Draw:
    return Draw(Sampling(max_tokens=1, **sampling), choice, step)  # type: ignore[arg-type]  # seed is an int where given


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    count = 20_000
    for temperature in (0.7, 1.0, 1.8):
        draws = [draw(step, seed=11, temperature=temperature) for step in range(count)]
        tokens = pick(logits.expand(count, -1), draws)
        found = np.bincount([token for token in tokens if token is not None], minlength=8)
        expected = torch.softmax(logits / temperature, dim=-1).numpy() * count
        chi_square = float(((found - expected) ** 2 / expected).sum())
        assert chi_square < 24.3  # 7 degrees of freedom: exceeded once in 1,000 by chance


def reference(logits: list[float], sampling: Sampling, u: float) -> int:
    """One row, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weights = [np.exp((logits[t] - max(logits)) / sampling.temperature) for t in order]
    total, kept, mass = sum(weights), [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= sampling.top_p * total:
            break
        kept.append((token, weight))
        mass += weight
    below = 0.0
    for token, weight in kept:
        below += weight
        if u * mass < below:
            return token
    return kept[-1][0]


@given(
    # Steps of 1/8 apart, so that no sum falls on a border by rounding alone.
    rows=st.lists(st.permutations([n / 8 for n in range(12)]), min_size=1, max_size=5),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.013, 0.3, 0.77, 0.999, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_a_draw_equals_the_slow_obvious_one(
    rows: list[list[float]], temperature: float, top_p: float, seed: int
) -> None:
    draws = [
        draw(step=n, seed=seed, temperature=temperature, top_p=top_p) for n in range(len(rows))
    ]
    tokens = pick(torch.tensor(rows), draws)
    for row, one, token in zip(rows, draws, tokens, strict=True):
        assert token == reference(row, one.sampling, uniform(one))


def test_neighbours_change_no_draw() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 50)
    draws = [draw(step=n % 3, choice=n // 3, seed=9, temperature=n / 8) for n in range(16)]
    together = pick(logits, draws)
    assert together == [pick(logits[n : n + 1], draws[n : n + 1])[0] for n in range(16)]


def test_seed_choice_and_step_each_give_other_numbers() -> None:
    numbers = {
        uniform(draw(step=step, choice=choice, seed=seed))
        for seed in (-1, 0, 1, 2**40)
        for choice in range(3)
        for step in range(3)
    }
    assert len(numbers) == 36
    assert all(0 <= number < 1 for number in numbers)


def test_a_temperature_near_zero_is_greedy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 30) * 50
    greedy = pick(logits, [draw(temperature=0.0)] * 4)
    assert pick(logits, [draw(temperature=1e-300)] * 4) == greedy
    assert greedy == logits.argmax(dim=-1).tolist()


def test_scores_that_are_not_finite_give_no_token() -> None:
    logits = torch.zeros(5, 4)
    logits[0, 1] = float("nan")
    logits[1, 2] = float("inf")
    logits[2] = float("-inf")
    logits[3, :3] = float("-inf")  # a mask is no fault
    tokens = pick(logits, [draw(), draw(temperature=0.0), draw(), draw(), draw()])
    assert tokens[:4] == [None, None, None, 3]
    assert tokens[4] is not None
