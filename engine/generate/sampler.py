"""Which token comes next? Greedy or drawn, row by row, in one pass over the batch.

Draws are keyed by (seed, choice, step) with a counter-based generator, so a row's numbers depend on
nothing but itself: neighbours, retries and restarts change no sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.request import Sampling

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's next token: how it is chosen, for which choice, and how many came before."""

    sampling: Sampling
    choice: int
    step: int


def pick(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token a row, None where its logits are not finite. logits: float32 [rows, vocab]."""
    best, greedy = logits.max(dim=-1)  # NaN wins every maximum, so this finds it too
    tokens: list[int | None] = [
        token if finite else None
        for token, finite in zip(greedy.tolist(), best.isfinite().tolist(), strict=True)
    ]
    drawn = [
        row
        for row, draw in enumerate(draws)
        if draw.sampling.temperature > 0 and tokens[row] is not None
    ]
    if drawn:
        chosen = _draw(logits[drawn] - best[drawn, None], [draws[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def uniform(draw: Draw) -> float:
    """This draw's number in [0, 1)."""
    key = np.array([draw.sampling.seed & _WORD, draw.choice & _WORD], dtype=np.uint64)
    counter = np.array([draw.step, 0, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from the softmax, cut to its top_p. logits: [rows, vocab], each row's greatest is 0."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([draw.sampling.temperature for draw in draws])
    top_p = column([draw.sampling.top_p for draw in draws])
    u = column([uniform(draw) for draw in draws])
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1)
    # Kept: the fewest likeliest tokens that reach top_p together, one at least.
    kept = reached - ordered < top_p
    kept[:, 0] = True
    mass = (ordered * kept).sum(dim=-1, keepdim=True)
    place = ((reached <= u * mass) & kept).sum(dim=-1, keepdim=True)
    # Rounding may leave the last kept token a hair short of the mass.
    place = torch.minimum(place, kept.sum(dim=-1, keepdim=True) - 1)
    return [int(token) for token in tokens.gather(1, place)[:, 0].tolist()]
