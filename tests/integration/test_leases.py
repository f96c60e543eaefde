"""Can a superseded attempt change anything, and is a flushed line ever run again?"""

import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.batch import BatchStatus, LineState, ShardState, StageName
from service.db import batches, lines, queue, session
from service.db.models import Part, Shard, UsageEntry
from service.db.queue import ClaimedShard, Lease, LeaseLost
from service.places import parts_prefix
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Gated, Watched
from tests.threads import running, wait_until
from worker import write_back
from worker.answers import Answered
from worker.tick import reap

LEASE = timedelta(seconds=30)

Write = Callable[[Session, Lease, datetime], object]


def planned(pipeline: Pipeline, number: int = 3) -> UUID:
    batch_id = pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(number)])
    pipeline.validate()
    pipeline.plan()
    return batch_id


def claim(pipeline: Pipeline) -> ClaimedShard:
    with pipeline.resources.database.transaction() as transaction:
        shard = queue.claim_shard(
            transaction, "stub-embed", worker="w", now=session.now(transaction), lease=LEASE
        )
    assert shard is not None
    return shard


def new_part(lease: Lease, sequence: int = 0) -> lines.NewPart:
    return lines.NewPart(
        sequence=sequence,
        storage_key=f"parts/{lease.batch_id.hex}/{lease.id.hex}-{lease.attempt}-{sequence}",
        bytes=10,
        model="stub-embed",
        standard_cost=Decimal("0.5"),
        paid_cost=Decimal("0.25"),
        effort=lines.Effort(8, 7, 0.25, 1, 0.5),
    )


def an_answer(line: int = 1) -> lines.Answer:
    return lines.Answer(line, LineState.SUCCEEDED, 200, None, 7, 0, 0, 2.5, 13, 5)


def record(transaction: Session, lease: Lease, now: datetime) -> None:
    lines.record(transaction, lease, new_part(lease), [an_answer()], now)


WRITES: dict[str, Write] = {
    "renew": lambda transaction, lease, now: queue.renew(transaction, lease, until=now + LEASE),
    "hold": lambda transaction, lease, _now: queue.hold(transaction, lease),
    "begin": lambda transaction, lease, _now: queue.begin(transaction, lease),
    "record": record,
    "settle": lambda transaction, lease, _now: queue.settle(transaction, lease),
    "hand back": lambda transaction, lease, now: queue.hand_back(
        transaction, lease, not_before=now
    ),
    "close": lambda transaction, lease, now: batches.hand_back(transaction, lease, now),
    "suspect": lambda transaction, lease, now: queue.suspect(transaction, lease, now=now),
    "give up": lambda transaction, lease, now: queue.give_up(transaction, lease, now=now),
}


def attempt(pipeline: Pipeline, write: Write, lease: Lease) -> None:
    with pipeline.resources.database.transaction() as transaction:
        write(transaction, lease, session.now(transaction))


def picture(pipeline: Pipeline) -> list[object]:
    """Everything a worker could have changed."""
    with pipeline.resources.database.transaction() as transaction:
        return [
            *transaction.execute(select(*Shard.__table__.columns)).all(),
            *transaction.execute(select(*Part.__table__.columns)).all(),
            *transaction.execute(select(*UsageEntry.__table__.columns)).all(),
            *transaction.execute(select(*lines.RequestLine.__table__.columns)).all(),
            *transaction.execute(select(*lines.Batch.__table__.columns)).all(),
        ]


def reaped(pipeline: Pipeline) -> None:
    pipeline.lose_workers()


def claimed_by_another(pipeline: Pipeline) -> None:
    pipeline.lose_workers()
    claim(pipeline)


def done_by_another(pipeline: Pipeline) -> None:
    pipeline.lose_workers()
    pipeline.drain()


def expired(pipeline: Pipeline) -> None:
    pipeline.expire(pipeline_batch(pipeline))


def pipeline_batch(pipeline: Pipeline) -> UUID:
    with pipeline.resources.database.transaction() as transaction:
        return transaction.scalars(select(lines.Batch.id)).one()


@pytest.mark.parametrize("supersede", [reaped, claimed_by_another, done_by_another, expired])
@pytest.mark.parametrize("write", list(WRITES))
def test_a_superseded_attempt_can_change_nothing(
    pipeline: Pipeline, write: str, supersede: Callable[[Pipeline], None]
) -> None:
    planned(pipeline)
    old = claim(pipeline)
    supersede(pipeline)
    before = picture(pipeline)
    with pytest.raises(LeaseLost):
        attempt(pipeline, WRITES[write], old.lease)
    assert picture(pipeline) == before


@pytest.mark.parametrize("write", list(WRITES))
def test_a_standing_attempt_can_do_all_of_it(pipeline: Pipeline, write: str) -> None:
    planned(pipeline)
    attempt(pipeline, WRITES[write], claim(pipeline).lease)


def test_a_claim_raises_the_attempt_and_names_the_worker(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline)
    first = claim(pipeline)
    with pipeline.resources.database.transaction() as transaction:
        queue.begin(transaction, first.lease)
    pipeline.lose_workers()
    second = claim(pipeline)
    assert (first.lease.attempt, second.lease.attempt) == (1, 2)
    assert first.lease.id == second.lease.id
    assert (first.deaths, second.deaths) == (0, 1)
    shard = pipeline.shards(batch_id)[0]
    assert (shard.worker, shard.state) == ("w", ShardState.LEASED)


def test_a_lease_that_is_renewed_is_not_reaped(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline)
    lease = claim(pipeline).lease
    attempt(pipeline, WRITES["renew"], lease)
    reap(pipeline.resources.database)
    assert pipeline.shards(batch_id)[0].state is ShardState.LEASED


def test_recording_a_part_twice_changes_nothing(pipeline: Pipeline) -> None:
    planned(pipeline)
    lease = claim(pipeline).lease
    attempt(pipeline, record, lease)
    before = picture(pipeline)
    attempt(pipeline, record, lease)
    assert picture(pipeline) == before


def test_a_recorded_part_stays_when_its_commit_is_repeated_after_the_lease_fell(
    pipeline: Pipeline,
) -> None:
    planned(pipeline)
    lease = claim(pipeline).lease
    attempt(pipeline, record, lease)
    claimed_by_another(pipeline)
    before = picture(pipeline)
    attempt(pipeline, record, lease)
    assert picture(pipeline) == before


def test_a_line_that_was_answered_already_makes_the_whole_part_nothing(pipeline: Pipeline) -> None:
    planned(pipeline)
    lease = claim(pipeline).lease
    attempt(pipeline, record, lease)
    before = picture(pipeline)

    def again(transaction: Session, lease: Lease, now: datetime) -> None:
        lines.record(transaction, lease, new_part(lease, 1), [an_answer(2), an_answer(1)], now)

    with pytest.raises(LeaseLost):
        attempt(pipeline, again, lease)
    assert picture(pipeline) == before


def test_a_flush_that_lost_its_lease_leaves_no_object(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline)
    old = claim(pipeline)
    reaped(pipeline)
    model = pipeline.resources.catalog.get("stub-embed")
    assert model is not None
    with pytest.raises(LeaseLost):
        write_back.flush(pipeline.resources, old.lease, model, 0, [Answered(1, "0", 200, {"x": 1})])
    prefix = parts_prefix(old.lease.batch_id.hex)
    assert list(pipeline.resources.storage.list(prefix)) == []
    assert pipeline.finish(batch_id).status is BatchStatus.COMPLETED
    invariants.check(pipeline, batch_id)


def test_a_superseded_stage_cannot_settle(pipeline: Pipeline) -> None:
    pipeline.submit([embedding_line("a")])
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        old = queue.claim_stage(transaction, StageName.VALIDATE, worker="w", now=now, lease=LEASE)
    assert old is not None
    pipeline.lose_workers()
    for name in ("renew", "settle", "hand back", "give up"):
        with pytest.raises(LeaseLost):
            attempt(pipeline, WRITES[name], old)


def test_two_workers_racing_answer_every_line_once(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.01)
    batch_id = small.submit([embedding_line(f"{n}", f"text {n}") for n in range(60)])
    small.validate()
    small.plan()
    seen: Counter[str] = Counter()
    start = threading.Barrier(2)

    def work() -> None:
        with small.engine(make=lambda: Watched(seen, results_per_step=3)) as drain:
            start.wait(20)
            drain.run()

    with running(work, work):
        pass
    assert set(seen.values()) == {1}
    assert len(seen) == 60
    small.assemble()
    small.clean()
    assert invariants.check(small, batch_id).status is BatchStatus.COMPLETED


def test_two_threads_of_one_worker_share_its_engine(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.01)
    batch_id = small.submit([embedding_line(f"{n}", f"text {n}") for n in range(60)])
    small.validate()
    small.plan()
    seen: Counter[str] = Counter()
    with (
        small.engine(make=lambda: Watched(seen, results_per_step=3)) as drain,
        running(*[drain.run] * 4),
    ):
        pass
    assert set(seen.values()) == {1}
    small.assemble()
    small.clean()
    assert invariants.check(small, batch_id).completed == 60


def test_a_flushed_line_is_never_run_again(pipeline: Pipeline) -> None:
    eager = pipeline.having(flush_s=0.000_001)
    batch_id = eager.submit([embedding_line(f"{n}", f"text {n}") for n in range(20)])
    eager.validate()
    eager.plan()
    seen: Counter[str] = Counter()
    gate = threading.Event()
    gate.set()

    class Closing(Gated):
        """Answers eight, and then no more until the gate is opened again."""

        def step(self) -> list[object]:  # type: ignore[override]
            results = super().step()
            if self.counters.requests == 8:
                gate.clear()
            return list(results)

    with eager.engine(make=lambda: Closing(seen, gate)) as drain, running(drain.run):
        wait_until(lambda: eager.batch(batch_id).completed == 8)
        flushed = [row.custom_id for row in eager.line_rows(batch_id) if row.part_id is not None]
        eager.lose_workers()
        # The worker finds its lease gone, drops its work, and claims the shard anew.
        wait_until(lambda: sum(seen.values()) == 32)
        gate.set()
    again = {text for text, times in seen.items() if times > 1}
    assert len(flushed) == 8
    assert len(again) == 12
    assert {f"text {name}" for name in flushed}.isdisjoint(again)
    eager.finish(batch_id)
    assert invariants.check(eager, batch_id).completed == 20
