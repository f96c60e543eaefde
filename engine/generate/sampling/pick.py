"""Which token comes next? Greedy or drawn, row by row, in one pass over a step's rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.generate.sampling.adjust import Draw, adjusted
from engine.generate.sampling.chance import uniform
from engine.generate.sampling.draw import draw
from engine.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class Pick:
    """A row's token, and what else was asked of its scores."""

    token: int
    logprob: TokenLogprob | None = None
    candidates: tuple[float, ...] = ()


def pick(scores: Tensor, draws: Sequence[Draw]) -> list[Pick | None]:
    """One token a row, None where its scores are not finite. scores: float32 [rows, vocab]."""
    raw = scores
    best, greedy = scores.max(dim=-1)  # NaN wins every maximum, so this finds it too
    sound = best.isfinite()
    if any(each.adjusts for each in draws):
        scores = adjusted(scores, draws)
        best, greedy = scores.max(dim=-1)
        sound &= best.isfinite()
    tokens = greedy.tolist()
    fine = sound.tolist()
    drawn = [row for row, each in enumerate(draws) if each.sampling.temperature > 0 and fine[row]]
    if drawn:
        chosen = draw(
            scores[drawn] - best[drawn, None],
            [draws[row].sampling for row in drawn],
            [uniform(d.sampling.seed, d.choice, d.step) for d in (draws[row] for row in drawn)],
        )
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    told = _tell(raw, draws, tokens, [row for row, good in enumerate(fine) if good])
    return [
        told.get(row, Pick(token)) if good else None
        for row, (token, good) in enumerate(zip(tokens, fine, strict=True))
    ]


def told(scores: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob | None]:
    """How likely the token of each row was, and the `count` likeliest; None for what is no number.

    scores: float32 [tokens, vocab].
    """
    logprobs = torch.log_softmax(scores, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    tops = [
        tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [
        TokenLogprob(token, logprob, top) if sound else None
        for token, logprob, top, sound in zip(
            tokens, own.tolist(), tops, (~own.isnan()).tolist(), strict=True
        )
    ]


def _tell(
    raw: Tensor, draws: Sequence[Draw], tokens: Sequence[int], fine: Sequence[int]
) -> dict[int, Pick]:
    """Of the rows that ask for log probabilities."""
    asking = [
        row
        for row in fine
        if draws[row].sampling.logprobs is not None or draws[row].sampling.candidates
    ]
    if not asking:
        return {}
    logprobs = torch.log_softmax(raw[asking], dim=-1)
    return {
        row: Pick(tokens[row], *_of_row(each, draws[row], tokens[row]))
        for row, each in zip(asking, logprobs, strict=True)
    }


def _of_row(
    logprobs: Tensor, draw: Draw, token: int
) -> tuple[TokenLogprob | None, tuple[float, ...]]:
    """logprobs: [vocab]."""
    asked, own = draw.sampling, None
    if asked.logprobs is not None:
        values, ids = logprobs.topk(min(asked.logprobs, len(logprobs)))
        top = zip(ids.tolist(), values.tolist(), strict=True)
        own = TokenLogprob(token, float(logprobs[token]), tuple(top))
    if not asked.candidates or draw.step:
        return own, ()
    return own, tuple(logprobs[list(asked.candidates)].tolist())
