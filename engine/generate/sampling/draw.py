"""Which token is drawn? One a row, from the softmax at its temperature, cut to its likeliest.

A row depends on nothing but itself, whatever stands beside it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.request import Sampling

# Likeliest tokens that are looked at first to find where a row is cut; a cut rarely lies further.
_NEAR = 512

# Rows that a CPU works on at once: what is made of them stays in its caches. Of 128 rows of 49,152
# scores a draw took 6 ms instead of 36; one cut by a flat `top_p`, sorted below, 50 instead of 390.
_AT_ONCE = 4

# The least temperature that is told from 0: below it, float32 has no number for its inverse.
_COLDEST = 1e-30


def draw(scores: Tensor, sampling: Sequence[Sampling], luck: Sequence[float]) -> list[int]:
    """The token of each row where the sum of weights, in the order of ids, passes `luck` of all.

    scores: float32 [rows, vocab], the greatest of each row 0; luck: in [0, 1).
    """
    many = _AT_ONCE if scores.device.type == "cpu" else max(1, len(scores))
    tokens: list[int] = []
    for begin in range(0, len(scores), many):
        rows = slice(begin, begin + many)
        tokens += _draw(scores[rows], sampling[rows], luck[rows])
    return tokens


def _draw(scores: Tensor, sampling: Sequence[Sampling], luck: Sequence[float]) -> list[int]:
    temperature = _column([max(_COLDEST, each.temperature) for each in sampling], scores)
    weights = torch.exp(scores / temperature)
    cut = [row for row, each in enumerate(sampling) if _cuts(each)]
    if cut:
        rows = torch.tensor(cut, device=scores.device)
        weights[rows] = _likeliest(weights[rows], [sampling[row] for row in cut])
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    whole = reached[:, -1:].contiguous()
    aim = whole * torch.tensor(luck, dtype=torch.float64, device=scores.device)[:, None]
    place = torch.searchsorted(reached, aim, right=True)
    # Rounding may put the aim at the very end: then it is the last token that weighs anything.
    last = torch.searchsorted(reached, whole)
    return [int(token) for token in torch.minimum(place, last)[:, 0].tolist()]


def _cuts(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _likeliest(weights: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """The weights, 0 below each row's cut. [rows, vocab], the greatest of each row 1.

    As transformers has it: the `top_k` likeliest, of those the fewest that reach `top_p` of their
    sum, of those the ones that weigh `min_p` of the likeliest. Equals stay together.
    """
    vocab = weights.shape[1]
    top_k = torch.tensor([min(each.top_k or vocab, vocab) for each in sampling])
    top_k = top_k.to(weights.device)[:, None]
    top_p = _column([each.top_p for each in sampling], weights, torch.float64)
    min_p = _column([each.min_p for each in sampling], weights)
    least, known = _least(weights, top_k, top_p, min(_NEAR, vocab))
    if not bool(known.all()):
        far = (~known).nonzero()[:, 0]
        least[far] = _least(weights[far], top_k[far], top_p[far], vocab)[0]
    return weights.masked_fill(weights < torch.maximum(least, min_p), 0)


def _least(weights: Tensor, top_k: Tensor, top_p: Tensor, near: int) -> tuple[Tensor, Tensor]:
    """The least weight kept [rows, 1], as `near` of them tell it; and where they do [rows]."""
    vocab = weights.shape[1]
    values = _greatest(weights, near)
    kth = values.gather(1, (top_k - 1).clamp(max=near - 1)).masked_fill(top_k > near, 0)
    whole = weights.masked_fill(weights < kth, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    reached = values.cumsum(dim=-1, dtype=torch.float64)
    # Where it lies beyond the `top_k` likeliest, the weight there is less than theirs.
    border = torch.searchsorted(reached, top_p * whole)
    share = values.gather(1, border.clamp(max=near - 1)).masked_fill(top_p >= 1, 0)
    known = (top_k <= near) | ((top_k == vocab) & ((top_p >= 1) | (border < near - 1)))
    return torch.maximum(kth, share), known[:, 0]


def _greatest(weights: Tensor, count: int) -> Tensor:
    """The greatest of each row, in descending order [rows, count].

    On a CPU by numpy, whose sorting has vector instructions: 14 ms where torch takes 400.
    """
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    values = weights.numpy()
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _column(values: list[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]
