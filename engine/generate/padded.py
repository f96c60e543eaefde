"""How do prompts become answers? In padded batches: a prompt piece or one token of each a step.

A batch is prompts of like length, padded on the left. Finished rows leave it; the next batch begins
when it is empty.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from torch import Tensor

from engine.config import EngineConfig
from engine.generate.accounts import Accounts
from engine.generate.answer import extend
from engine.generate.running import RunningBatch
from engine.memory import is_out_of_memory, release
from engine.model.load import Decoder
from engine.outcome import Outcome
from engine.plan.budget import Budget
from engine.plan.waiting import Waiting
from engine.request import Failure, FailureReason, GenerateRequest, Generation, Result
from engine.surface import Counters


class GenerateLoop:
    """Takes generate requests in and moves one padded batch on by a step."""

    def __init__(
        self, decoder: Decoder, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._decoder = decoder
        self._max_rows = config.max_rows
        self._prefill_tokens = config.prefill_tokens
        self._prompt_budget = Budget.of(config.token_budget)
        self._cache_budget = Budget.of(config.cache_tokens)
        self._waiting: Waiting[GenerateRequest] = Waiting(lambda request: len(request.prompt))
        self._running: RunningBatch | None = None
        self._tried_alone: set[Hashable] = set()
        self._accounts = Accounts(clock)

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        """Take in requests that were found fit to run."""
        self._waiting.add(requests)

    def remove(self, ids: Collection[Hashable]) -> None:
        """Forget these requests, waiting or running."""
        self._waiting.remove(ids)
        self._tried_alone.difference_update(ids)
        for key in ids:
            self._accounts.drop(key)
        if self._running is not None:
            self._keep([answer.request.id not in ids for answer in self._running.answers])

    def step(self) -> Outcome:
        """Compute a piece of the batch's prompts, or its next tokens."""
        if self._running is None:
            requests = self._waiting.take(self._fits)
            if not requests:
                return Outcome()
            self._running = RunningBatch(self._decoder, requests, self._prefill_tokens)
        running, began = self._running, self._accounts.clock()
        logits, enough = self._try(running)
        if not enough:
            return self._cut_smaller(running)
        cost = Counters(padded_tokens=running.last_cost)
        if logits is None:  # more of the prompts is to come
            self._note(running, began, sampled=False)
            return Outcome(cost=cost)
        return Outcome(tuple(self._extend(running, logits, began)), cost)

    def _fits(self, requests: Sequence[GenerateRequest]) -> bool:
        return (
            len(requests) <= self._max_rows
            and _prompt_cost(requests) <= self._prompt_budget.current
            and _cache_cost(requests) <= self._cache_budget.current
        )

    def _try(self, running: RunningBatch) -> tuple[Tensor | None, bool]:
        """The logits, if the prompts are through, and whether the memory sufficed."""
        try:
            return running.forward(), True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None, False

    def _note(self, running: RunningBatch, began: float, *, sampled: bool) -> None:
        """What the batch's last forward cost, row by row."""
        keys = [answer.request.id for answer in running.answers]
        columns = running.last_cost // len(keys)
        self._accounts.note([(key, columns) for key in keys], keys if sampled else (), began)

    def _extend(self, running: RunningBatch, logits: Tensor, began: float) -> list[Result]:
        """Give each answer its next token; the results of those that are finished by it."""
        found = extend(running.answers, logits)
        self._note(running, began, sampled=True)
        results: list[Result] = []
        for each in found:
            match each:
                case int():
                    pass
                case Generation():
                    results.append(replace(each, work=self._accounts.close(each.id)))
                case Failure():
                    self._accounts.drop(each.id)
                    results.append(each)
                case unreachable:
                    assert_never(unreachable)
        finished = [not isinstance(each, int) for each in found]
        running.feed([each if isinstance(each, int) else 0 for each in found])
        self._tried_alone.difference_update(result.id for result in results)
        if any(finished):
            self._keep([not done for done in finished])
        if self._running is None:
            self._prompt_budget = self._prompt_budget.after_success()
            self._cache_budget = self._cache_budget.after_success()
        return results

    def _keep(self, kept: Sequence[bool]) -> None:
        """Let the other rows leave the batch; an empty batch is dropped with its cache."""
        if self._running is None or all(kept):
            return
        if any(kept):
            self._running.keep([row for row, stays in enumerate(kept) if stays])
        else:
            self._running = None

    def _cut_smaller(self, running: RunningBatch) -> Outcome:
        """Begin the batch's requests again in smaller batches; a single one twice, then no more.

        Starting over changes no answer: greedy tokens and keyed draws come out the same.
        """
        requests = [answer.request for answer in running.answers]
        prefilling = running.prefilling
        self._running = None
        running.drop()
        release(self._decoder.device)
        if prefilling:
            cost = _prompt_cost(requests)
            self._prompt_budget = self._prompt_budget.after_out_of_memory(cost)
        else:
            cost = _cache_cost(requests)
            self._cache_budget = self._cache_budget.after_out_of_memory(cost)
        shortage = Counters(out_of_memory=1)
        if len(requests) == 1 and requests[0].id in self._tried_alone:
            self._tried_alone.discard(requests[0].id)
            self._accounts.drop(requests[0].id)
            self._prompt_budget = self._prompt_budget.after_blame()
            self._cache_budget = self._cache_budget.after_blame()
            return Outcome((_too_large(requests[0]),), shortage)
        if len(requests) == 1:
            self._tried_alone.add(requests[0].id)
        self._waiting.put_back(requests)
        return Outcome(cost=shortage)


def _prompt_cost(requests: Sequence[GenerateRequest]) -> int:
    """Padded prompt tokens: longest × rows."""
    return max(len(request.prompt) for request in requests) * len(requests)


def _cache_cost(requests: Sequence[GenerateRequest]) -> int:
    """Most tokens whose keys and values the batch may come to hold."""
    longest = max(len(request.prompt) for request in requests)
    return (longest + max(request.sampling.max_tokens for request in requests)) * len(requests)


def _too_large(request: GenerateRequest) -> Failure:
    tokens = len(request.prompt) + request.sampling.max_tokens
    message = f"A request of {tokens} tokens (max_tokens included) does not fit into memory."
    return Failure(request.id, FailureReason.OUT_OF_MEMORY, message)
