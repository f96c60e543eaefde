"""Does the invariant hold whatever happens, in whatever order? Random histories, read by the files.

Each step is what one process does at one moment: a worker claims, flushes, is lost, comes back from
the dead; the clock ticks; a client cancels, pauses, retries. Claims stand open between steps, so
any two of them interleave. In the end a healthy service finishes what is left, and every batch must
satisfy `tests.invariants`, its lines never having run again once they were flushed.
"""

from collections import Counter
from contextlib import ExitStack, suppress
from uuid import UUID

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, text

from service import doctor
from service.batch import TERMINAL, BatchStatus, LineState, ShardState, StageName
from service.db import batches, lines, queue, session
from service.db.base import Base
from service.db.lines import PendingLine
from service.db.models import Project, RequestLine, Shard, Stage
from service.db.queue import ClaimedShard, Lease, LeaseLost
from service.errors import Conflict
from service.faults import Fault
from service.ids import new_id
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from worker import answers, assemble, clean, plan, tick, validate, write_back
from worker.answers import Answered
from worker.lease import Cancelling, KeptLease
from worker.resources import Resources
from worker.stages import Work

WORK: dict[StageName, Work] = {
    StageName.VALIDATE: validate.validate,
    StageName.PLAN: plan.plan,
    StageName.ASSEMBLE: assemble.assemble,
    StageName.CLEAN: clean.clean,
}

EXAMPLES = 25
STEPS = 30


class Worker:
    """An engine worker's hold on a shard, as it believes: it may have been reaped long ago."""

    def __init__(self, pipeline: Pipeline, shard: ClaimedShard) -> None:
        self._pipeline, self.shard = pipeline, shard
        self._sequence = 0
        with pipeline.resources.database.transaction() as transaction:
            batch_id = shard.lease.batch_id
            self.left: list[PendingLine] = lines.pending(transaction, batch_id, shard.lines)

    def flush(self, number: int, *, fail: bool) -> list[int]:
        """Write some lines back; those that are recorded by it. Raises LeaseLost."""
        done, self.left = self.left[:number], self.left[number:]
        resources, lease = self._pipeline.resources, self.shard.lease
        model = resources.catalog.get(self.shard.model)
        assert model is not None
        write_back.flush(
            resources, lease, model, self._sequence, [_answer(row, fail=fail) for row in done]
        )
        self._sequence += 1
        return [row.line for row in done]

    def settle(self) -> None:
        """All is flushed: settle; else hand back. Raises LeaseLost."""
        lease = self.shard.lease
        with self._pipeline.resources.database.transaction() as transaction:
            now = session.now(transaction)
            if self.left:
                batches.hand_back(transaction, lease, now)
                return
            queue.lock_batch(transaction, lease.batch_id)
            queue.settle(transaction, lease)
            batches.advance(transaction, lease.batch_id, now)


def _answer(row: PendingLine, *, fail: bool) -> Answered:
    if fail:
        fault = Fault("made up", None, "internal_error")
        return answers.refused(row.line, row.custom_id, fault, status_code=500)
    body = {"model": "stub-embed", "usage": {"prompt_tokens": 3, "total_tokens": 3}}
    return Answered(row.line, row.custom_id, 200, body, input_tokens=3)


class Service(RuleBasedStateMachine):
    """A service of several workers, none of which can be relied on."""

    batch_ids = Bundle("batch_ids")
    workers = Bundle("workers")
    stages = Bundle("stages")

    resources: Resources

    @initialize()
    def begin(self) -> None:
        tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
        self.resources.storage.delete(self.resources.storage.list(""))
        project_id = new_id()
        with self.resources.database.transaction() as transaction:
            transaction.execute(text(f"TRUNCATE {tables} CASCADE"))
            now = session.now(transaction)
            transaction.add(Project(id=project_id, name="test", created_at=now))
        # One or two lines a shard.
        self.pipeline = Pipeline(self.resources, project_id).having(shard_s=0.004)
        self.submitted: list[UUID] = []
        self.flushed: Counter[tuple[UUID, int]] = Counter()
        self.counts: dict[UUID, tuple[int, int, int]] = {}

    @rule(target=batch_ids, number=st.integers(1, 5), bad=st.booleans())
    def submit(self, number: int, bad: bool) -> UUID:
        requests = [embedding_line(f"{n}", f"text {n}") for n in range(number)]
        batch_id = self.pipeline.submit([*requests, b"{"] if bad and number == 5 else requests)
        self.submitted.append(batch_id)
        return batch_id

    @rule(target=stages, name=st.sampled_from(list(WORK)))
    def claim_stage(self, name: StageName) -> object:
        with self.resources.database.transaction() as transaction:
            now, lease = session.now(transaction), self.resources.settings.lease
            claim = queue.claim_stage(transaction, name, worker="cpu", now=now, lease=lease)
        return multiple() if claim is None else (name, claim)

    @rule(stage=consumes(stages))
    def work_on_stage(self, stage: tuple[StageName, Lease]) -> None:
        """Perhaps long after another worker took the claim over, or did all of it."""
        name, claim = stage
        kept = KeptLease(claim)
        try:
            WORK[name](self.resources, kept)
        except LeaseLost:
            pass
        except Cancelling:
            with suppress(LeaseLost), self.resources.database.transaction() as transaction:
                batches.hand_back(transaction, claim, session.now(transaction))
        except assemble.Incomplete:
            # A superseded assembler may find parts removed, but one that holds its claim may not.
            with pytest.raises(LeaseLost), self.resources.database.transaction() as transaction:
                queue.hold(transaction, claim)

    @rule(target=workers)
    def claim_shard(self) -> object:
        with self.resources.database.transaction() as transaction:
            now, lease = session.now(transaction), self.resources.settings.lease
            claim = queue.claim_shard(
                transaction, "stub-embed", worker="engine", now=now, lease=lease
            )
        return multiple() if claim is None else Worker(self.pipeline, claim)

    @rule(worker=workers, number=st.integers(1, 3), fail=st.booleans())
    def flush(self, worker: Worker, number: int, fail: bool) -> None:
        with suppress(LeaseLost):
            batch_id = worker.shard.lease.batch_id
            self.flushed.update((batch_id, line) for line in worker.flush(number, fail=fail))

    @rule(worker=consumes(workers))
    def settle(self, worker: Worker) -> None:
        with suppress(LeaseLost):
            worker.settle()

    @rule(worker=workers)
    def renew(self, worker: Worker) -> None:
        with suppress(LeaseLost), self.resources.database.transaction() as transaction:
            until = session.now(transaction) + self.resources.settings.lease
            queue.renew(transaction, worker.shard.lease, until=until)

    @rule()
    def lose_workers(self) -> None:
        """They stall past their leases. They do not know, and some go on."""
        self.pipeline.lose_workers()

    @rule(times=st.integers(1, 2))
    def tick(self, times: int) -> None:
        self.pipeline.skip_waits()
        for _ in range(times):
            tick.tick(self.resources)

    @rule(batch_id=batch_ids)
    def cancel(self, batch_id: UUID) -> None:
        with suppress(Conflict):
            self.pipeline.cancel(batch_id)

    @rule(batch_id=batch_ids)
    def end_window(self, batch_id: UUID) -> None:
        self.pipeline.end_window(batch_id)

    @rule(batch_id=batch_ids)
    def pause(self, batch_id: UUID) -> None:
        with suppress(Conflict):
            self.pipeline.pause(batch_id)

    @rule(batch_id=batch_ids)
    def resume(self, batch_id: UUID) -> None:
        with suppress(Conflict):
            self.pipeline.resume(batch_id)

    @rule(target=batch_ids, batch_id=batch_ids)
    def retry(self, batch_id: UUID) -> object:
        try:
            made = self.pipeline.retry(batch_id)
        except Conflict:
            return multiple()
        if made in self.submitted:
            return multiple()
        self.submitted.append(made)
        return made

    @rule()
    def see_the_doctor(self) -> None:
        """Run by hand, in the middle of it all."""
        for finding in self._findings():
            if finding.mend is not None:
                finding.mend()

    def _findings(self) -> list[doctor.Finding]:
        patient = doctor.Patient(
            self.resources.database, self.resources.storage, self.resources.settings.lease
        )
        return list(doctor.examine(patient))

    @invariant()
    def no_line_is_answered_twice_and_counts_never_fall(self) -> None:
        assert max(self.flushed.values(), default=0) <= 1
        for batch_id in self.submitted:
            batch = self.pipeline.batch(batch_id)
            now = (batch.total, batch.completed, batch.failed)
            before = self.counts.get(batch_id, (0, 0, 0))
            dropped = batch.status is BatchStatus.CANCELLED and batch.in_progress_at is None
            assert dropped or all(new >= old for new, old in zip(now, before, strict=True))
            self.counts[batch_id] = now

    def teardown(self) -> None:
        """The workers that are left are lost; a healthy service takes over."""
        self.pipeline.lose_workers()
        for batch_id in self.submitted:
            with suppress(Conflict):
                self.pipeline.resume(batch_id)
        for batch_id in self.submitted:
            batch = self.pipeline.finish(batch_id)
            assert batch.status in TERMINAL
            if batch.status is not BatchStatus.FAILED:
                invariants.check(self.pipeline, batch_id)
        self._no_flushed_line_was_lost()
        assert self._findings() == []

    def _no_flushed_line_was_lost(self) -> None:
        with self.resources.database.transaction() as transaction:
            answered = select(RequestLine.batch_id, RequestLine.line).where(
                RequestLine.state.in_([LineState.SUCCEEDED, LineState.FAILED])
            )
            rows = {(row.batch_id, row.line) for row in transaction.execute(answered)}
            open_claims = [
                *transaction.scalars(select(Stage.id).where(Stage.state == ShardState.LEASED)),
                *transaction.scalars(select(Shard.id).where(Shard.state == ShardState.LEASED)),
            ]
        assert set(self.flushed) <= rows
        assert open_claims == []


def test_the_invariant_holds_after_any_history(resources: Resources) -> None:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Service, "resources", resources, raising=False)
        run_state_machine_as_test(
            Service,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
