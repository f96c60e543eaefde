"""How is a claimed shard run? Bodies in, engine requests out, finished lines written back."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import assert_never

import orjson
from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.request import (
    Classification,
    Embedding,
    Encoded,
    Failure,
    FailureReason,
    Generation,
    Request,
    Result,
    TokenClassification,
)
from engine.surface import TokenizerLike
from service.bodies.check import InvalidBody, Rules
from service.catalog import Model
from service.clock import Clock
from service.db import batches, lines, queue, session
from service.db.lines import PendingLine
from service.db.models import Batch, File
from service.db.queue import ClaimedShard
from service.faults import Fault
from worker import answers, prompts, retry
from worker.answers import Answered
from worker.engine_loop import EngineLoop, Inbox
from worker.fetch import pieces
from worker.lease import KeptLease
from worker.resources import Resources
from worker.retry import LineFailure
from worker.write_back import flush

POLL_S = 0.5

DEATHS = 2
"""After the first death of its worker a shard runs alone; after so many it is cut in halves, until
the line that kills workers stands by itself. One that still does is not tried again."""

FAILURES = 2
"""The same of attempts that end in an exception of ours: only the line at fault pays for it."""

_FAILURES = {
    FailureReason.TOO_LONG: LineFailure.TOO_LONG,
    FailureReason.INVALID: LineFailure.INVALID,
    FailureReason.OUT_OF_MEMORY: LineFailure.OUT_OF_MEMORY,
    FailureReason.NON_FINITE: LineFailure.NON_FINITE,
}


@dataclass(frozen=True, slots=True)
class ModelOnLoop:
    """A loaded model: its catalog entry, its tokenizer and the loop that runs it."""

    model: Model
    tokenizer: TokenizerLike
    loop: EngineLoop


class GivenUp(Enum):
    """Why lines are answered with 500 instead of being tried again: the message to the client."""

    INTERNAL_ERROR = "This request failed for a reason of the service's own."
    WORKER_CRASH = "This request ended the worker that ran it, each time it was tried."


@dataclass(slots=True)
class _Running:
    """A line whose requests are with the engine."""

    row: PendingLine
    prompt: prompts.Prompt
    requests: Sequence[Request]
    results: dict[int, Encoded | Generation]


@dataclass(frozen=True, slots=True)
class _Later:
    """A line to be tried again."""

    line: int
    failure: LineFailure
    at: datetime


class ShardRun:
    """One attempt at one shard, from its first read to its settling."""

    def __init__(
        self,
        resources: Resources,
        on: ModelOnLoop,
        shard: ClaimedShard,
        kept: KeptLease,
        *,
        stopping: Callable[[], bool],
        clock: Clock,
        handed_in: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._resources = resources
        self._on = on
        self._shard = shard
        self._kept = kept
        self._stopping = stopping
        self._clock = clock
        self._handed_in = handed_in
        self._rules = Rules.of(resources.settings)
        self._inbox = Inbox()
        self._running: dict[int, _Running] = {}
        # Which line and which of its requests an id stands for.
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._finished: list[Answered] = []
        self._later: list[_Later] = []
        # Where the shard is only to be cut: the lines of each half.
        self._halves: tuple[Sequence[int], ...] = ()
        self._endpoint = ""
        self._sequence = 0
        self._begun_at = self._flushed_at = clock()

    def run(self) -> bool:
        """Answer every line, or hand back at a cancel, pause or shutdown. True where the batch
        closed by it.

        Raises LeaseLost, or whatever a bug raises; the engine then holds nothing of the shard.
        """
        try:
            ahead = self._begin()
            piece = next(ahead, None)
            while (piece or self._running) and not self._must_end():
                if piece:
                    self._hand_in(piece)
                    piece = next(ahead, None)
                self._collect(0 if piece else POLL_S)
                if self._clock() - self._flushed_at >= self._resources.settings.flush_s:
                    self._flush()
            # What the engine finished while the last flush took its time is not run again.
            self._collect(0)
            whole = not piece and not self._running
        finally:
            self._abort()
        self._flush()
        return self._settle() if whole else self._hand_back()

    def _must_end(self) -> bool:
        self._kept.check()
        return self._kept.handing_back or self._stopping()

    def _begin(self) -> Iterator[list[tuple[PendingLine, bytes]]]:
        """What is to be run, in plan order, a few lines at a time."""
        lease = self._shard.lease
        with self._resources.database.transaction() as transaction:
            batch, file = transaction.execute(
                select(Batch, File)
                .join(File, File.id == Batch.input_file_id)
                .where(Batch.id == lease.batch_id)
            ).one()
            rows = lines.pending(transaction, lease.batch_id, self._shard.lines)
        failure = self._given_up(rows)
        if failure is not None:
            fault = Fault(failure.value, None, failure.name.lower())
            self._finished = [
                answers.refused(row.line, row.custom_id, fault, status_code=500) for row in rows
            ]
            return iter(())
        by_line = {row.line: row for row in rows}
        ordered = [line for line in self._shard.lines if line in by_line]
        if self._to_be_cut(rows, file):
            self._halves = (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :])
            return iter(())
        self._endpoint = batch.endpoint
        in_order = [by_line[line] for line in ordered]
        return pieces(self._resources.storage, file.storage_key, in_order)

    def _hand_in(self, piece: Sequence[tuple[PendingLine, bytes]]) -> None:
        """Refuse what cannot be run, submit the rest."""
        prepared = [each for row, raw in piece for each in self._prepare(row, raw)]
        if prepared:
            self._on.loop.submit(prepared, self._inbox)
        self._handed_in(len(piece))

    def _to_be_cut(self, rows: Sequence[PendingLine], file: File) -> bool:
        """Whether one of several lines may be what went wrong, and is yet to be found."""
        if len(rows) < 2:
            return False
        if self._shard.failures >= FAILURES:
            # Bytes that are gone are no line's fault: halves would fare no better.
            self._resources.storage.size(file.storage_key)
            return True
        return self._shard.deaths >= DEATHS

    def _given_up(self, rows: Sequence[PendingLine]) -> GivenUp | None:
        """Why the shard's lines are not tried again, if so. Of several lines, because they could
        not even be cut."""
        if self._shard.failures >= max(self._resources.settings.max_attempts, FAILURES + 1):
            return GivenUp.INTERNAL_ERROR
        if len(rows) == 1 and self._shard.deaths > DEATHS:
            return GivenUp.WORKER_CRASH
        return None

    def _prepare(self, row: PendingLine, raw: bytes) -> Sequence[Request]:
        lease = self._shard.lease
        try:
            prompt = prompts.read(
                orjson.loads(raw)["body"],
                endpoint=self._endpoint,
                model=self._on.model,
                tokenizer=self._on.tokenizer,
                rules=self._rules,
                line_seed=prompts.seed_of(lease.batch_id, row.line),
            )
        except InvalidBody as invalid:
            self._finished.append(answers.refused(row.line, row.custom_id, invalid.fault))
            return ()
        requests = prompts.requests(prompt, key=(lease.id, lease.attempt, row.line))
        self._running[row.line] = _Running(row, prompt, requests, {})
        for position, request in enumerate(requests):
            self._places[request.id] = row.line, position
        return requests

    def _collect(self, wait_s: float) -> None:
        for result in self._inbox.take(wait_s):
            line, position = self._places[result.id]
            running = self._running.get(line)
            if running is not None:  # else another request of the line has failed already
                self._take(running, position, result)

    def _take(self, running: _Running, position: int, result: Result) -> None:
        match result:
            case Failure():
                self._fail(running, position, result)
            case Embedding() | Classification() | TokenClassification() | Generation():
                running.results[position] = result
                if len(running.results) == len(running.requests):
                    del self._running[running.row.line]
                    self._finished.append(self._answer(running))
            case unreachable:
                assert_never(unreachable)

    def _answer(self, running: _Running) -> Answered:
        row, prompt = running.row, running.prompt
        ordered = [running.results[position] for position in range(len(running.requests))]
        return answers.answered(
            row.line,
            row.custom_id,
            prompt,
            ordered,
            labels=self._on.loop.labels,
            created=int(self._now().timestamp()),
        )

    def _fail(self, running: _Running, position: int, result: Failure) -> None:
        row = running.row
        del self._running[row.line]
        self._on.loop.abort([request.id for request in running.requests])
        failure = _FAILURES[result.reason]
        decision = retry.decide(
            failure,
            attempts=row.attempts + 1,
            max_attempts=self._resources.settings.max_attempts,
            now=self._now(),
            luck=retry.luck(),
        )
        match decision:
            case retry.Again(at):
                self._later.append(_Later(row.line, failure, at))
            case retry.Final(status_code):
                param = prompts.param_of(running.prompt, result.param, position=position)
                fault = Fault(result.message, param, failure)
                self._finished.append(
                    answers.refused(row.line, row.custom_id, fault, status_code=status_code)
                )
            case unreachable:
                assert_never(unreachable)

    def _now(self) -> datetime:
        """Postgres's clock, as it stood at the claim and moved on by ours."""
        return self._shard.claimed_at + timedelta(seconds=self._clock() - self._begun_at)

    def _abort(self) -> None:
        left = [request.id for one in self._running.values() for request in one.requests]
        if left:
            self._on.loop.abort(left)

    def _flush(self) -> None:
        self._flushed_at = self._clock()
        finished, self._finished = self._finished, []
        self._kept.heed(
            flush(self._resources, self._shard.lease, self._on.model, self._sequence, finished)
        )
        self._sequence += 1
        self._on.loop.answered(each.effort.engine_s for each in finished if each.succeeded)

    def _settle(self) -> bool:
        lease = self._shard.lease
        with self._resources.database.transaction() as transaction:
            now = session.now(transaction)
            queue.lock_batch(transaction, lease.batch_id)
            queue.settle(transaction, lease)
            self._postpone(transaction)
            self._cut(transaction, now)
            return batches.advance(transaction, lease.batch_id, now)

    def _postpone(self, transaction: Session) -> None:
        """Lines to be tried again go to a new shard, which waits for the last of them."""
        if not self._later:
            return
        lease = self._shard.lease
        until = max(later.at for later in self._later)
        for failure in sorted({later.failure for later in self._later}):
            lines.postpone(
                transaction,
                lease.batch_id,
                [later.line for later in self._later if later.failure == failure],
                error_code=failure,
                until=until,
            )
        cost = max(1, self._shard.cost * len(self._later) // len(self._shard.lines))
        shard = queue.NewShard(self._shard.model, [later.line for later in self._later], cost)
        queue.add_shards(transaction, lease.batch_id, [shard], not_before=until)

    def _cut(self, transaction: Session, now: datetime) -> None:
        """Halves of a shard that ended its worker, or an attempt: each of them will run alone."""
        if not self._halves:
            return
        shards = [
            queue.NewShard(
                self._shard.model,
                half,
                max(1, self._shard.cost // 2),
                failures=min(self._shard.failures, FAILURES - 1),
                deaths=min(self._shard.deaths, DEATHS - 1),
            )
            for half in self._halves
        ]
        queue.add_shards(transaction, self._shard.lease.batch_id, shards, not_before=now)

    def _hand_back(self) -> bool:
        lease = self._shard.lease
        with self._resources.database.transaction() as transaction:
            return batches.hand_back(transaction, lease, session.now(transaction))
