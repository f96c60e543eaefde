"""How do requests become results on an encoder? One batch a step, the longest texts first."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from engine.config import Kind
from engine.encode.forward import Forward
from engine.encode.texts import Asked, Text
from engine.memory import Limit, is_out_of_memory, release, widened
from engine.model.heads import Head
from engine.model.load import Encoder
from engine.model.scores import cut, scores
from engine.outcome import Outcome
from engine.plan.budget import Budget
from engine.plan.waiting import Waiting
from engine.request import (
    Classification,
    Embedding,
    Encoded,
    EncodeRequest,
    Failure,
    FailureReason,
    Result,
    TokenClassification,
    Work,
)
from engine.surface import Counters

STORE_BYTES = 32 << 20  # of what recent texts came to


class EncodeLoop:
    """Takes encode requests in and runs one batch of their texts a step.

    `clock` gives seconds; `limit` is asked whether a batch fits into memory, beside the budget.
    """

    def __init__(
        self,
        encoder: Encoder,
        forward: Forward,
        *,
        kind: Kind,
        token_budget: int,
        limit: Limit,
        clock: Callable[[], float],
    ) -> None:
        self._encoder = encoder
        self._forward = forward
        self._kind = kind
        self._limit = limit
        self._clock = clock
        self._budget = Budget.of(token_budget)
        self._asked = Asked(STORE_BYTES)
        self._waiting: Waiting[Text] = Waiting(lambda text: len(text.tokens))
        self._tried_alone: set[bytes] = set()

    @property
    def token_budget(self) -> int:
        """Most tokens of a batch now."""
        return self._budget.current

    def add(self, requests: Iterable[EncodeRequest]) -> None:
        """Take in requests that were found fit to run."""
        self._waiting.add(self._asked.add(requests))

    def remove(self, ids: Collection[Hashable]) -> None:
        """Forget these requests."""
        unasked = self._asked.remove(ids)
        if unasked:
            self._waiting.remove(unasked)
            self._tried_alone -= unasked

    def step(self) -> Outcome:
        """Answer what is known already, or else compute the next batch."""
        known = self._asked.known()
        if known:
            answers = tuple(self._answer(request, row, Work()) for request, row in known)
            return Outcome(answers, Counters(twins=len(answers)))
        batch = self._forward.take(self._waiting, self._allows)
        if not batch:
            return Outcome()
        begun = self._clock()
        rows = self._try(batch)
        if rows is None:
            return self._cut_smaller(batch)
        self._budget = self._budget.after_success()
        costs = self._forward.costs(batch)
        again = {n for n, row in enumerate(rows) if not np.isfinite(row).all()}
        mended = self._in_float32([batch[n] for n in sorted(again)])
        for n, row in zip(sorted(again), mended, strict=True):
            costs[n] += len(batch[n].tokens)
            rows[n] = row
        seconds = (self._clock() - begun) / sum(costs)
        works = [Work(cost, cost * seconds, len(batch)) for cost in costs]
        return self._settle(batch, rows, works, non_finite=len(again))

    def _allows(self, tokens: int, longest: int) -> bool:
        return tokens <= self._budget.current and self._limit.allows(tokens, longest)

    def _try(self, batch: Sequence[Text]) -> list[NDArray[np.float32]] | None:
        """A row each, or None where the memory did not suffice."""
        try:
            return self._forward.rows(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _settle(
        self,
        batch: Sequence[Text],
        rows: Sequence[NDArray[np.float32]],
        works: Sequence[Work],
        *,
        non_finite: int,
    ) -> Outcome:
        """Answer everybody who asked for one of these texts."""
        results: list[Result] = []
        twins = 0
        for text, row, work in zip(batch, rows, works, strict=True):
            self._tried_alone.discard(text.id)
            if not np.isfinite(row).all():
                message = "What the model makes of this input is not finite."
                results += self._fail(text, FailureReason.NON_FINITE, message)
                continue
            asking = self._asked.settle(text, row)
            twins += max(0, len(asking) - 1)
            results += [
                self._answer(request, row, Work() if n else work)
                for n, request in enumerate(asking)
            ]
        cost = Counters(
            padded_tokens=sum(work.computed_tokens for work in works),
            rows=len(batch),
            twins=twins,
            non_finite=non_finite,
        )
        return Outcome(tuple(results), cost)

    def _answer(self, request: EncodeRequest, row: NDArray[np.float32], work: Work) -> Encoded:
        """The result of a request; owns its numbers, so that it keeps no batch in memory."""
        head: Head = self._encoder.head
        tokens = len(request.tokens)
        match self._kind:
            case Kind.EMBED:
                vector = cut(row, request.dimensions, normalizes=head.normalizes)
                return Embedding(request.id, vector, tokens, work)
            case Kind.CLASSIFY | Kind.SCORE:
                made = scores(row, head.activation)
                return Classification(request.id, row.copy(), made, tokens, work)
            case Kind.TOKEN_CLASSIFY:
                return TokenClassification(request.id, scores(row, head.activation), tokens, work)
            case Kind.GENERATE:
                msg = "a generating model encodes nothing"
                raise ValueError(msg)
            case unreachable:
                assert_never(unreachable)

    def _cut_smaller(self, batch: list[Text]) -> Outcome:
        """Let the batch be tried again in smaller pieces; a single text twice, then no more."""
        release(self._encoder.device)
        self._budget = self._budget.after_out_of_memory(sum(self._forward.costs(batch)))
        cost = Counters(out_of_memory=1)
        if len(batch) == 1 and batch[0].id in self._tried_alone:
            self._tried_alone.discard(batch[0].id)
            self._budget = self._budget.after_blame()
            message = f"An input of {len(batch[0].tokens)} tokens does not fit into memory."
            return Outcome(tuple(self._fail(batch[0], FailureReason.OUT_OF_MEMORY, message)), cost)
        if len(batch) == 1:
            self._tried_alone.add(batch[0].id)
        self._waiting.put_back(batch)
        return Outcome(cost=cost)

    def _fail(self, text: Text, reason: FailureReason, message: str) -> list[Result]:
        return [
            Failure(request.id, reason, message, "input")
            for request in self._asked.settle(text, None)
        ]

    def _in_float32(self, batch: Sequence[Text]) -> list[NDArray[np.float32]]:
        """Each alone in float32: half precision overflows where float32 does not.

        A row that memory does not suffice for comes back as not a number.
        """
        if not batch:
            return []
        with widened(self._encoder.whole):
            tried = [self._try([text]) for text in batch]
        nothing = np.full(1, np.nan, dtype=np.float32)
        return [nothing if rows is None else rows[0] for rows in tried]
