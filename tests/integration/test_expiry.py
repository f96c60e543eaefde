"""Does the clock end every window, and does nothing that comes later count?"""

import threading
from collections import Counter
from uuid import UUID

from service.batch import BatchStatus, LineState, ShardState, StageName
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Gated
from tests.threads import running, wait_until
from worker import assemble, stages, tick, validate
from worker.lease import KeptLease
from worker.resources import Resources

MESSAGE = "This request could not be executed before the completion window expired."


def submitted(pipeline: Pipeline, number: int = 6) -> UUID:
    return pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(number)])


def test_a_batch_that_was_never_validated_expires_empty(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.expire(batch_id)
    assert pipeline.batch(batch_id).status is BatchStatus.VALIDATING
    pipeline.validate()
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert batch.status is BatchStatus.EXPIRED
    assert (batch.total, batch.output_file_id, batch.error_file_id) == (0, None, None)


def test_a_validation_under_way_when_the_window_ends_commits_nothing(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)

    def late(resources: Resources, kept: KeptLease) -> None:
        pipeline.expire(batch_id)
        validate.validate(resources, kept)

    stages.run_ready(pipeline.resources, StageName.VALIDATE, late)
    assert pipeline.line_rows(batch_id) == []
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert (batch.status, batch.total) == (BatchStatus.EXPIRED, 0)


def test_a_batch_without_an_engine_worker_expires_with_all_its_lines(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    pipeline.expire(batch_id)
    assert {row.state for row in pipeline.line_rows(batch_id)} == {LineState.EXPIRED}
    assert pipeline.batch(batch_id).status is BatchStatus.IN_PROGRESS
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert batch.status is BatchStatus.EXPIRED
    assert (batch.total, batch.completed, batch.failed) == (6, 0, 0)
    assert [line["error"] for line in pipeline.errors(batch_id)] == [
        {"code": "batch_expired", "message": MESSAGE}
    ] * 6


def test_finished_lines_stay_and_late_ones_are_refused(pipeline: Pipeline) -> None:
    eager = pipeline.having(flush_s=0.000_001)
    batch_id = submitted(eager)
    eager.validate()
    eager.plan()
    gate = threading.Event()
    gate.set()

    class Three(Gated):
        def step(self) -> list[object]:  # type: ignore[override]
            results = super().step()
            if self.counters.requests == 3:
                self._gate.clear()
            return list(results)

    with eager.engine(make=lambda: Three(Counter(), gate)) as drain, running(drain.run):
        wait_until(lambda: eager.batch(batch_id).completed == 3)
        eager.expire(batch_id)
        eager.assemble()
        gate.set()  # the rest is finished now, too late
    eager.clean()
    batch = invariants.check(eager, batch_id)
    assert batch.status is BatchStatus.EXPIRED
    assert (batch.total, batch.completed, batch.failed) == (6, 3, 0)
    assert len(eager.errors(batch_id)) == 3


def test_a_batch_already_finalizing_completes(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    assert pipeline.batch(batch_id).status is BatchStatus.FINALIZING
    pipeline.expire(batch_id)
    pipeline.assemble()
    pipeline.clean()
    assert invariants.check(pipeline, batch_id).status is BatchStatus.COMPLETED


def test_a_window_that_is_not_over_is_left_alone(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    tick.close_due(pipeline.resources.database)
    assert pipeline.batch(batch_id).frozen_at is None


def test_the_end_of_a_window_noticed_twice_is_one_end(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.plan()
    pipeline.end_window(batch_id)
    database = pipeline.resources.database
    with running(*[lambda: tick.close_due(database)] * 3):
        pass
    frozen = pipeline.batch(batch_id).frozen_at
    tick.close_due(database)
    assert pipeline.batch(batch_id).frozen_at == frozen
    assert pipeline.open_stages(batch_id) == [StageName.ASSEMBLE]
    assert {shard.state for shard in pipeline.shards(batch_id)} == {ShardState.DEAD}


def test_the_status_turns_with_the_files_and_not_before(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)
    pipeline.validate()
    pipeline.expire(batch_id)
    seen = []

    def watching(resources: Resources, kept: KeptLease) -> None:
        seen.append(pipeline.batch(batch_id))
        assemble.assemble(resources, kept)
        seen.append(pipeline.batch(batch_id))

    stages.run_ready(pipeline.resources, StageName.ASSEMBLE, watching)
    before, after = seen
    assert (before.status, before.error_file_id) == (BatchStatus.IN_PROGRESS, None)
    assert after.status is BatchStatus.EXPIRED
    assert after.error_file_id is not None


def test_many_windows_end_in_one_tick(pipeline: Pipeline) -> None:
    ids = [submitted(pipeline, 1) for _ in range(5)]
    pipeline.validate()
    for batch_id in ids:
        pipeline.end_window(batch_id)
    tick.tick(pipeline.resources)
    pipeline.assemble()
    assert {pipeline.batch(each).status for each in ids} == {BatchStatus.EXPIRED}
