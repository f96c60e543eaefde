"""How do texts become vectors? In padded batches of like length, the longest first."""

from collections.abc import Collection, Hashable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.memory import is_out_of_memory, release, widened
from engine.model.load import Encoder
from engine.outcome import Outcome
from engine.plan.budget import Budget
from engine.plan.waiting import Waiting
from engine.request import Embedding, EncodeRequest, Failure, FailureReason, Result
from engine.surface import Counters


class EncodeLoop:
    """Takes embedding requests in and encodes one padded batch a step."""

    def __init__(self, encoder: Encoder, config: EngineConfig) -> None:
        self._encoder = encoder
        self._max_rows = config.max_rows
        self._budget = Budget.of(config.token_budget)
        self._waiting: Waiting[EncodeRequest] = Waiting(lambda request: len(request.tokens))
        self._tried_alone: set[Hashable] = set()

    def add(self, requests: Iterable[EncodeRequest]) -> None:
        """Take in requests that were found fit to run."""
        self._waiting.add(requests)

    def remove(self, ids: Collection[Hashable]) -> None:
        """Forget these requests."""
        self._waiting.remove(ids)
        self._tried_alone.difference_update(ids)

    def step(self) -> Outcome:
        """Encode the next batch."""
        batch = self._waiting.take(self._fits)
        if not batch:
            return Outcome()
        vectors = self._try(batch)
        if vectors is None:
            return self._cut_smaller(batch)
        self._budget = self._budget.after_success()
        finite = [bool(np.isfinite(row).all()) for row in vectors]
        results: list[Result] = [
            # A copy each, so that a result kept for long does not keep its whole batch.
            Embedding(id=request.id, vector=row.copy(), input_tokens=len(request.tokens))
            for request, row, whole in zip(batch, vectors, finite, strict=True)
            if whole
        ]
        again = [request for request, whole in zip(batch, finite, strict=True) if not whole]
        results += self._in_float32(again)
        self._tried_alone.difference_update(result.id for result in results)
        cost = Counters(
            padded_tokens=_cost(batch) + sum(len(request.tokens) for request in again),
            non_finite=len(again),
        )
        return Outcome(tuple(results), cost)

    def _fits(self, batch: Sequence[EncodeRequest]) -> bool:
        return len(batch) <= self._max_rows and _cost(batch) <= self._budget.current

    def _try(self, batch: Sequence[EncodeRequest]) -> NDArray[np.float32] | None:
        """float32 [rows, dims], or None where the memory did not suffice."""
        try:
            return self._encode(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _encode(self, batch: Sequence[EncodeRequest]) -> NDArray[np.float32]:
        ids, mask = _pad(batch, self._encoder.pad_id)
        device = self._encoder.device
        vectors = self._encoder.vectors(ids.to(device), mask.to(device))
        return vectors.float().cpu().numpy()

    def _cut_smaller(self, batch: list[EncodeRequest]) -> Outcome:
        """Let the batch be tried again in smaller pieces; a single request twice, then no more."""
        release(self._encoder.device)
        self._budget = self._budget.after_out_of_memory(_cost(batch))
        cost = Counters(out_of_memory=1)
        if len(batch) == 1 and batch[0].id in self._tried_alone:
            self._tried_alone.discard(batch[0].id)
            message = f"An input of {len(batch[0].tokens)} tokens does not fit into memory."
            return Outcome(
                (Failure(batch[0].id, FailureReason.OUT_OF_MEMORY, message, "input"),), cost
            )
        if len(batch) == 1:
            self._tried_alone.add(batch[0].id)
        self._waiting.put_back(batch)
        return Outcome(cost=cost)

    def _in_float32(self, requests: Sequence[EncodeRequest]) -> list[Result]:
        """Each alone in float32: half precision overflows where float32 does not."""
        if not requests:
            return []
        with widened(self._encoder.model):
            rows = [self._try([request]) for request in requests]
        results: list[Result] = []
        for request, row in zip(requests, rows, strict=True):
            if row is not None and np.isfinite(row).all():
                results.append(Embedding(request.id, row[0], len(request.tokens)))
            else:
                message = "The model's vector for this input is not finite."
                results.append(Failure(request.id, FailureReason.NON_FINITE, message, "input"))
        return results


def _cost(batch: Sequence[EncodeRequest]) -> int:
    """Padded tokens: longest × rows; the first of a batch is its longest."""
    return len(batch[0].tokens) * len(batch)


def _pad(batch: Sequence[EncodeRequest], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [rows, longest], padded on the right."""
    ids = torch.full((len(batch), len(batch[0].tokens)), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, : len(request.tokens)] = torch.tensor(request.tokens)
        mask[row, : len(request.tokens)] = 1
    return ids, mask
