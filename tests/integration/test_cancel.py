"""Does a cancel end a batch from every state, at any moment, however often it is asked for?"""

import threading
from collections import Counter
from uuid import UUID

import pytest

from service.batch import BatchStatus, LineState, ShardState, StageName
from service.db import session
from service.db.models import Batch
from service.errors import Conflict
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Gated, Stuck, Watched
from tests.threads import running, wait_until
from worker import plan, stages, validate
from worker.lease import KeptLease
from worker.resources import Resources


def submitted(pipeline: Pipeline, number: int = 6) -> UUID:
    return pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(number)])


def ended(pipeline: Pipeline, batch_id: UUID, completed: int, total: int = 6) -> None:
    """Cancelled, with so many lines in the output file and the others in the error file."""
    batch = invariants.check(pipeline, batch_id)
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.total, batch.completed, batch.failed) == (total, completed, 0)
    codes = {line["error"]["code"] for line in pipeline.errors(batch_id)}
    assert codes <= {"batch_cancelled"}


def test_a_batch_that_waits_for_validation_ends_at_once_and_empty(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    assert pipeline.cancel(batch_id) is BatchStatus.CANCELLING
    assert pipeline.open_stages(batch_id) == [StageName.ASSEMBLE]
    pipeline.validate()
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0, total=0)
    assert pipeline.batch(batch_id).error_file_id is None


def test_a_batch_under_validation_ends_without_its_lines(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)

    def cancelled_meanwhile(resources: Resources, kept: KeptLease) -> None:
        assert pipeline.cancel(batch_id) is BatchStatus.CANCELLING
        validate.validate(resources, kept)

    stages.run_ready(pipeline.resources, StageName.VALIDATE, cancelled_meanwhile)
    # Closed by the validating worker itself: nobody waits for a tick.
    assert pipeline.open_stages(batch_id) == [StageName.ASSEMBLE]
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0, total=0)


def test_a_bad_file_under_validation_ends_cancelled_and_not_failed(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit(b"{\n")

    def cancelled_meanwhile(resources: Resources, kept: KeptLease) -> None:
        pipeline.cancel(batch_id)
        validate.validate(resources, kept)

    stages.run_ready(pipeline.resources, StageName.VALIDATE, cancelled_meanwhile)
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0, total=0)


def test_a_long_validation_hears_of_the_cancel_while_it_reads(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline, 2_500)

    def told(resources: Resources, kept: KeptLease) -> None:
        pipeline.cancel(batch_id)
        wait_until(lambda: kept.cancelling)
        validate.validate(resources, kept)
        raise AssertionError("it read to the end")

    stages.run_ready(pipeline.resources, StageName.VALIDATE, told)
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0, total=0)


def test_a_batch_that_waits_for_its_plan_ends_with_all_lines_cancelled(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.cancel(batch_id)
    pipeline.plan()
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0)
    assert {row.state for row in pipeline.line_rows(batch_id)} == {LineState.CANCELLED}


def test_a_batch_under_planning_ends_when_the_plan_is_made(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()

    def cancelled_meanwhile(resources: Resources, kept: KeptLease) -> None:
        pipeline.cancel(batch_id)
        plan.plan(resources, kept)

    stages.run_ready(pipeline.resources, StageName.PLAN, cancelled_meanwhile)
    assert {shard.state for shard in pipeline.shards(batch_id)} <= {ShardState.DEAD}
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0)


def test_shards_that_nobody_has_claimed_do_not_run(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    pipeline.cancel(batch_id)
    seen: Counter[str] = Counter()
    pipeline.drain(make=lambda: Watched(seen))
    assert not seen
    pipeline.assemble()
    pipeline.clean()
    ended(pipeline, batch_id, 0)


def test_lines_in_flight_are_dropped_after_what_is_finished_was_flushed(
    pipeline: Pipeline,
) -> None:
    lazy = pipeline.having(flush_s=3_600)
    texts = ["fine a", "fine b", "stuck c", "stuck d"]
    batch_id = lazy.submit([embedding_line(text, text) for text in texts])
    lazy.validate()
    lazy.plan()
    engine = Stuck(Counter())
    with lazy.engine(make=lambda: engine) as drain, running(drain.run):
        wait_until(lambda: engine.counters.requests == 2)
        assert lazy.batch(batch_id).completed == 0
        assert lazy.cancel(batch_id) is BatchStatus.CANCELLING
    # The worker heard of it at a renewal, flushed, handed back and closed the batch.
    assert lazy.open_stages(batch_id) == [StageName.ASSEMBLE]
    lazy.assemble()
    lazy.clean()
    ended(lazy, batch_id, 2, total=4)
    assert [line["custom_id"] for line in lazy.output(batch_id)] == texts[:2]


def test_a_worker_lost_in_the_middle_does_not_keep_the_batch_from_ending(
    pipeline: Pipeline,
) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    gate = threading.Event()
    with pipeline.engine(make=lambda: Gated(Counter(), gate)) as drain, running(drain.run):
        wait_until(lambda: pipeline.shards(batch_id)[0].state is ShardState.LEASED)
        pipeline.cancel(batch_id)
        pipeline.lose_workers()
    pipeline.finish(batch_id)
    ended(pipeline, batch_id, 0)


@pytest.mark.parametrize("times", [2, 5])
def test_a_cancel_asked_for_again_changes_nothing(pipeline: Pipeline, times: int) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    for _ in range(times):
        assert pipeline.cancel(batch_id) is BatchStatus.CANCELLING
    stamp = pipeline.batch(batch_id).cancelling_at
    pipeline.assemble()
    pipeline.clean()
    for _ in range(times):
        assert pipeline.cancel(batch_id) is BatchStatus.CANCELLED
    ended(pipeline, batch_id, 0)
    assert pipeline.batch(batch_id).cancelling_at == stamp


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "finalizing"])
def test_a_batch_past_its_run_cannot_be_cancelled(pipeline: Pipeline, status: str) -> None:
    batch_id = pipeline.submit(b"{\n") if status == "failed" else submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    if status == "expired":
        pipeline.expire(batch_id)
    if status in {"completed", "finalizing"}:
        pipeline.drain()
    if status != "finalizing":
        pipeline.assemble()
    assert pipeline.batch(batch_id).status == status
    with pytest.raises(Conflict, match=f"Cannot cancel a batch with status '{status}'") as caught:
        pipeline.cancel(batch_id)
    assert caught.value.headers["x-should-retry"] == "false"
    assert pipeline.finish(batch_id).status == status.replace("finalizing", "completed")
    invariants.check(pipeline, batch_id)


def test_a_batch_whose_window_ended_stays_expired_when_it_is_cancelled(pipeline: Pipeline) -> None:
    """Its lines are frozen as expired and its files are being made."""
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.expire(batch_id)
    with pytest.raises(Conflict, match="'expired'"):
        pipeline.cancel(batch_id)
    pipeline.assemble()
    pipeline.clean()
    assert invariants.check(pipeline, batch_id).status is BatchStatus.EXPIRED


def test_cancels_at_the_same_moment_are_one(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    with running(*[lambda: pipeline.cancel(batch_id)] * 4):
        pass
    pipeline.finish(batch_id)
    ended(pipeline, batch_id, 0)


def test_a_cancelled_batch_has_no_window_to_miss(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.cancel(batch_id)
    pipeline.expire(batch_id)
    pipeline.finish(batch_id)
    ended(pipeline, batch_id, 0)
    with pipeline.resources.database.transaction() as transaction:
        batch = transaction.get_one(Batch, batch_id)
        assert batch.cancelled_at is not None
        assert batch.expired_at is None
        assert batch.cancelled_at <= session.now(transaction)
