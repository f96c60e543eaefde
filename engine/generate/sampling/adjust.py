"""What speaks for a token, or against it, beside the model's scores? Penalties, biases, bans."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.grammar import Guide
from engine.request import Sampling


@dataclass(slots=True)
class Seen:
    """Which tokens stand in a prompt, and how often each in its answer so far."""

    prompt: NDArray[np.int64]  # each once
    made: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Sequence[int], sampling: Sampling) -> "Seen | None":
        """None where no penalty asks for it."""
        if not _penalised(sampling):
            return None
        return cls(np.unique(np.asarray(prompt, dtype=np.int64)))

    def add(self, token: int) -> None:
        """One more token of the answer."""
        self.made[token] = self.made.get(token, 0) + 1

    def both(self) -> NDArray[np.int64]:
        """Tokens of prompt and answer, each once."""
        made = np.fromiter(self.made, np.int64, len(self.made))
        return np.union1d(self.prompt, made)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's next token: how it is chosen, for which choice, and how many came before.

    `ends` are the tokens that end a text; `seen` is there where a penalty needs it, `guide` where
    a grammar is to be followed.
    """

    sampling: Sampling
    choice: int
    step: int
    ends: Sequence[int] = ()
    seen: Seen | None = None
    guide: Guide | None = None

    @property
    def adjusts(self) -> bool:
        """Whether the model's scores are not all there is to it."""
        return bool(
            self.seen is not None
            or self.guide is not None
            or self.sampling.logit_bias
            or self.step < self.sampling.min_tokens
        )


def adjusted(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """A copy of float32 [rows, vocab], changed as `Sampling` says."""
    scores = scores.clone()
    _change(scores, _repeated(draws), lambda old, by: torch.where(old > 0, old / by, old * by))
    _change(scores, _penalties(draws), torch.sub)
    _change(scores, _biases(draws), torch.add)
    _change(scores, _bans(draws), torch.add)
    for row, draw in enumerate(draws):
        if draw.guide is not None:
            barred = torch.from_numpy(draw.guide.barred(scores.shape[1])).to(scores.device)
            scores[row].masked_fill_(barred, -torch.inf)
    return scores


class _Change(NamedTuple):
    """What is done to some tokens of a row."""

    row: int
    tokens: NDArray[np.int64]
    by: NDArray[np.float32]


def _change(
    scores: Tensor, changes: Iterable[_Change], do: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """All at once; no token of a row may come twice."""
    listed = list(changes)
    if not listed:
        return
    rows = np.repeat([each.row for each in listed], [len(each.tokens) for each in listed])
    place = (
        torch.from_numpy(rows).to(scores.device),
        torch.from_numpy(np.concatenate([each.tokens for each in listed])).to(scores.device),
    )
    by = torch.from_numpy(np.concatenate([each.by for each in listed])).to(scores.device)
    scores[place] = do(scores[place], by)


def _repeated(draws: Sequence[Draw]) -> Iterable[_Change]:
    for row, draw in enumerate(draws):
        penalty = draw.sampling.repetition_penalty
        if draw.seen is not None and penalty != 1:
            tokens = draw.seen.both()
            yield _Change(row, tokens, np.full(len(tokens), penalty, np.float32))


def _penalties(draws: Sequence[Draw]) -> Iterable[_Change]:
    for row, draw in enumerate(draws):
        if draw.seen is not None and draw.seen.made:
            made, asked = draw.seen.made, draw.sampling
            tokens = np.fromiter(made, np.int64, len(made))
            counts = np.fromiter(made.values(), np.float32, len(made))
            by = asked.frequency_penalty * counts + asked.presence_penalty
            yield _Change(row, tokens, by.astype(np.float32))


def _biases(draws: Sequence[Draw]) -> Iterable[_Change]:
    for row, draw in enumerate(draws):
        if draw.sampling.logit_bias:
            tokens, by = zip(*draw.sampling.logit_bias, strict=True)
            yield _Change(row, np.asarray(tokens, np.int64), np.asarray(by, np.float32))


def _bans(draws: Sequence[Draw]) -> Iterable[_Change]:
    for row, draw in enumerate(draws):
        if draw.step < draw.sampling.min_tokens and draw.ends:
            tokens = np.asarray(draw.ends, np.int64)
            yield _Change(row, tokens, np.full(len(tokens), -np.inf, np.float32))


def _penalised(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )
