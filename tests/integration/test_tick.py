"""Does the tick set right what a lost message or a dead worker left, and nothing else?"""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

import pytest
import redis
from psycopg import Connection, OperationalError, connect
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from service.batch import TERMINAL, BatchStatus, ShardState, StageName
from service.db import batches, hung, queue, session, workers
from service.db.hung import WORKERS
from service.db.models import Batch, File, Worker
from service.db.workers import Figures
from service.storage import Storage
from service.wake import engine_queue
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Watched
from tests.threads import running
from worker import leftovers, stages, tick
from worker.engine_process import EngineProcess, UnknownModel, serving
from worker.lease import KeptLease
from worker.resources import Resources


def submitted(pipeline: Pipeline, number: int = 4) -> UUID:
    return pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(number)])


def test_a_batch_goes_its_way_by_ticks_alone(pipeline: Pipeline) -> None:
    """`finish` sends no message that anybody takes: what is done is done by looking."""
    batch_id = submitted(pipeline)
    assert pipeline.finish(batch_id).status is BatchStatus.COMPLETED
    invariants.check(pipeline, batch_id)


def test_ticks_at_the_same_moment_are_harmless(pipeline: Pipeline) -> None:
    ids = [submitted(pipeline) for _ in range(3)]
    pipeline.validate()
    pipeline.end_window(ids[0])
    with running(*[lambda: tick.tick(pipeline.resources)] * 4):
        pass
    for batch_id in ids:
        pipeline.finish(batch_id)
        invariants.check(pipeline, batch_id)


def test_whoever_has_work_is_woken_and_nobody_else(pipeline: Pipeline) -> None:
    with redis.Redis.from_url(pipeline.resources.settings.redis_url.get_secret_value()) as broker:
        broker.flushall()
        tick.tick(pipeline.resources)
        assert broker.keys("*") in ([], [b"_kombu.binding.cpu"])
        submitted(pipeline)
        tick.tick(pipeline.resources)
        assert (broker.llen("cpu"), broker.llen(engine_queue("stub-embed"))) == (1, 0)
        pipeline.validate()
        pipeline.plan()
        broker.flushall()
        tick.tick(pipeline.resources)
        assert (broker.llen("cpu"), broker.llen(engine_queue("stub-embed"))) == (0, 1)
        # Emptied or not, the work is still there.
        broker.flushall()
        tick.tick(pipeline.resources)
        assert broker.llen(engine_queue("stub-embed")) == 1
        broker.flushall()


def test_a_running_batch_that_nobody_closed_is_closed(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    with pipeline.resources.database.transaction() as transaction:
        transaction.execute(text("DELETE FROM stages WHERE name = 'assemble'"))
        transaction.execute(update(Batch).values(status="in_progress", finalizing_at=None))
    tick.close_stalled(pipeline.resources.database)
    assert pipeline.batch(batch_id).status is BatchStatus.FINALIZING
    assert pipeline.finish(batch_id).status is BatchStatus.COMPLETED


def test_a_batch_that_works_is_not_closed(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    for step in (pipeline.validate, pipeline.plan):
        tick.close_stalled(pipeline.resources.database)
        assert pipeline.batch(batch_id).status not in TERMINAL
        step()
    tick.close_stalled(pipeline.resources.database)
    assert pipeline.batch(batch_id).status is BatchStatus.IN_PROGRESS
    assert [shard.state for shard in pipeline.shards(batch_id)] == [ShardState.READY]


def test_a_deleted_file_keeps_its_bytes_until_its_batch_has_ended(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    storage, database = pipeline.resources.storage, pipeline.resources.database
    with database.transaction() as transaction:
        file = transaction.get_one(File, pipeline.batch(batch_id).input_file_id)
        key = file.storage_key
        file.deleted_at = session.now(transaction)
    leftovers.sweep_all(pipeline.resources)
    assert storage.size(key) > 0
    pipeline.run()
    invariants.check(pipeline, batch_id)
    leftovers.sweep_all(pipeline.resources)
    assert list(storage.list(key)) == []
    with database.transaction() as transaction:
        assert transaction.get_one(File, file.id).removed_at is not None


def test_a_file_past_its_time_leaves_and_its_bytes_go(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.run()
    with pipeline.resources.database.transaction() as transaction:
        file = transaction.get_one(File, pipeline.batch(batch_id).output_file_id)
        file.expires_at = session.now(transaction)
        key = file.storage_key
    leftovers.sweep_all(pipeline.resources)
    assert list(pipeline.resources.storage.list(key)) == []
    with pipeline.resources.database.transaction() as transaction:
        assert transaction.get_one(File, file.id).deleted_at is not None


def test_the_clock_does_not_wait_for_the_store(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    with pipeline.resources.database.transaction() as transaction:
        file = transaction.get_one(File, pipeline.batch(batch_id).input_file_id)
        file.deleted_at = session.now(transaction)
    pipeline.end_window(batch_id)

    def touched(*_: object, **__: object) -> None:
        pytest.fail("the tick touched the store, which may hang")

    for name in ("delete", "list", "read", "put", "size"):
        monkeypatch.setattr(Storage, name, touched)
    tick.tick(pipeline.resources)
    assert pipeline.batch(batch_id).frozen_at is not None


def test_a_duty_that_fails_stops_no_other(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned, due = submitted(pipeline), submitted(pipeline)
    pipeline.validate()
    for batch_id in (poisoned, due):
        pipeline.end_window(batch_id)
    expire = batches.expire

    def fails_for_one(transaction: Session, batch_id: UUID, now: datetime) -> bool:
        if batch_id == poisoned:
            raise RuntimeError("a bug")
        return expire(transaction, batch_id, now)

    def fails(*_: object) -> None:
        raise RuntimeError("another bug")

    monkeypatch.setattr(batches, "expire", fails_for_one)
    monkeypatch.setattr(tick, "reap", fails)
    tick.tick(pipeline.resources)
    assert pipeline.batch(poisoned).frozen_at is None
    assert pipeline.batch(due).frozen_at is not None


def test_only_one_process_sweeps(pipeline: Pipeline) -> None:
    engine = pipeline.resources.database.engine
    with queue.only_one(engine, queue.SWEEP) as first, queue.only_one(engine, queue.SWEEP) as other:
        assert (first, other) == (True, False)
    with queue.only_one(engine, queue.SWEEP) as again:
        assert again


def test_processes_that_claim_at_once_keep_to_their_worker_s_share(pipeline: Pipeline) -> None:
    held = pipeline.resources.worker_settings.stage_slots
    for _ in range(6):
        submitted(pipeline, 1)
    gate = threading.Barrier(6)
    most: list[int] = []

    def count(_: Resources, kept: KeptLease) -> None:
        with pipeline.resources.database.transaction() as transaction:
            most.append(queue.stages_held(transaction, worker=pipeline.resources.name))
            queue.settle(transaction, kept.lease)

    def process() -> None:
        gate.wait(20)
        stages.run_ready(pipeline.resources, StageName.VALIDATE, count)

    with running(*[process] * 6):
        pass
    assert 1 <= max(most) <= held


@contextmanager
def stalled(pipeline: Pipeline, statement: str, *, worker: bool = True) -> Iterator[Connection]:
    """A connection, of a worker or not, that says no more after that statement."""
    url = pipeline.resources.settings.database_url.get_secret_value()
    name = f"{WORKERS}elsewhere:1" if worker else "psql"
    with closing(connect(url, application_name=name)) as connection:
        connection.execute(statement)
        yield connection


LOCKED = "UPDATE projects SET name = 'locked'"


def hung_ended(pipeline: Pipeline) -> int:
    with pipeline.resources.database.transaction() as transaction:
        return hung.end(transaction, timedelta())


def test_what_a_stalled_worker_holds_locked_is_given_free(pipeline: Pipeline) -> None:
    with stalled(pipeline, LOCKED) as connection:
        tick.end_hung(pipeline.resources.database, timedelta(hours=1))
        connection.execute("SELECT 1")  # not for so long yet
        tick.end_hung(pipeline.resources.database, timedelta())
        with pytest.raises(OperationalError):
            connection.execute("SELECT 1")
    with pipeline.resources.database.transaction() as transaction:
        session.wait_briefly(transaction)
        transaction.execute(text(LOCKED))


@pytest.mark.parametrize(("statement", "worker"), [("SELECT 1", True), (LOCKED, False)])
def test_readers_and_people_may_think_as_long_as_they_like(
    pipeline: Pipeline, statement: str, worker: bool
) -> None:
    with stalled(pipeline, statement, worker=worker) as connection:
        assert hung_ended(pipeline) == 0
        connection.execute("SELECT 1")


def test_a_copy_that_waits_for_its_worker_is_ended_once_others_wait_for_it(
    pipeline: Pipeline,
) -> None:
    url = pipeline.resources.settings.database_url.get_secret_value()
    with stalled(pipeline, LOCKED) as connection, connect(url, autocommit=True) as other:
        cursor = connection.cursor()
        with suppress(OperationalError), cursor.copy("COPY model_speeds (model) FROM STDIN"):
            assert hung_ended(pipeline) == 0
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(other.execute, LOCKED)
                until_ended = 0
                while not waiting.done():
                    until_ended += hung_ended(pipeline)
                waiting.result()
            assert until_ended >= 1
        with pytest.raises(OperationalError):
            connection.execute("SELECT 1")


def test_a_worker_not_heard_of_is_forgotten(pipeline: Pipeline) -> None:
    lease = pipeline.resources.settings.lease
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        workers.beat(transaction, "gone", {"a": Figures()}, now - lease * (tick.SILENT_LEASES + 1))
        workers.beat(transaction, "here", {"b": Figures()}, now)
        assert workers.served(transaction) == {"a", "b"}
    tick.tick(pipeline.resources)
    with pipeline.resources.database.transaction() as transaction:
        assert workers.served(transaction) == {"b"}


def test_an_engine_process_serves_its_models_beats_and_leaves(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()

    def names() -> list[str]:
        with pipeline.resources.database.transaction() as transaction:
            return list(transaction.scalars(select(Worker.name)))

    with serving(pipeline.resources) as process:
        assert names() == [pipeline.resources.name]
        process.drain("stub-embed")
        process.drain("nobody")
    assert names() == []
    pipeline.assemble()
    pipeline.clean()
    assert invariants.check(pipeline, batch_id).status is BatchStatus.COMPLETED


def test_a_stopped_engine_process_claims_nothing(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    with serving(pipeline.resources) as process:
        assert isinstance(process, EngineProcess)
        process.stop()
        process.drain("stub-embed")
    assert [shard.attempt for shard in pipeline.shards(batch_id)] == [0]


def test_serving_a_model_that_is_not_in_the_catalog_is_refused(pipeline: Pipeline) -> None:
    wrong = pipeline.resources.worker_settings.model_copy(update={"serve": ("nobody",)})
    refused = serving(replace(pipeline.resources, worker_settings=wrong))
    with pytest.raises(UnknownModel, match="nobody"):
        refused.__enter__()


def test_processes_of_a_cpu_worker_are_kept_free_of_stages(pipeline: Pipeline) -> None:
    for _ in range(4):
        submitted(pipeline, 1)
    held = pipeline.resources.worker_settings.stage_slots
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        for _ in range(held):
            queue.claim_stage(
                transaction,
                StageName.VALIDATE,
                worker=pipeline.resources.name,
                now=now,
                lease=timedelta(seconds=30),
            )
    pipeline.validate()
    with pipeline.resources.database.transaction() as transaction:
        assert queue.stages_held(transaction, worker=pipeline.resources.name) == held
        assert queue.ready_stages(transaction, session.now(transaction)) == [StageName.VALIDATE]


def test_nothing_waits_for_another_for_ever(pipeline: Pipeline) -> None:
    """Write-backs, renewals, ticks, cancels and expiry of the same batches, all at once."""
    small = pipeline.having(shard_s=0.003, flush_s=0.000_001)
    ids = [submitted(small, 30) for _ in range(4)]
    small.validate()
    small.plan()
    start = threading.Barrier(6)

    def work() -> None:
        with small.engine(make=lambda: Watched(Counter(), results_per_step=1)) as drain:
            start.wait(20)
            drain.run()

    def disturb(batch_id: UUID, *, cancel: bool) -> None:
        start.wait(20)
        for round_ in range(15):
            tick.tick(small.resources)
            if round_ == 5:
                small.cancel(batch_id) if cancel else small.end_window(batch_id)

    def look() -> None:
        start.wait(20)
        for _ in range(15):
            tick.reap(small.resources.database)
            tick.close_due(small.resources.database)
            tick.close_stalled(small.resources.database)

    with running(
        work,
        work,
        work,
        lambda: disturb(ids[0], cancel=True),
        lambda: disturb(ids[1], cancel=False),
        look,
    ):
        pass
    with small.resources.database.transaction() as transaction:
        # One would be resolved by Postgres and retried by us, and so not be seen otherwise.
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        assert transaction.execute(text(query)).scalar_one() == 0
    found = []
    for batch_id in ids:
        small.finish(batch_id)
        found.append(invariants.check(small, batch_id).status)
    assert found[0] in {BatchStatus.CANCELLED, BatchStatus.COMPLETED}
    assert found[1] in {BatchStatus.EXPIRED, BatchStatus.COMPLETED}
    assert found[2:] == [BatchStatus.COMPLETED] * 2
