"""Does a paused batch rest, with nothing lost, while its window runs on?"""

import threading
from collections import Counter
from datetime import timedelta

import pytest

from service.batch import BatchStatus, ShardState
from service.db import queue, session
from service.errors import Conflict
from tests import invariants
from tests.integration.api_objects import MAKERS
from tests.integration.api_server import api_over
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Gated, Watched
from tests.threads import running, wait_until
from worker import tick

NUMBER = 20


def runnable(pipeline: Pipeline) -> list[str]:
    with pipeline.resources.database.transaction() as transaction:
        return queue.runnable_models(transaction, session.now(transaction))


def test_of_a_paused_batch_nothing_is_claimed_until_it_is_resumed(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    pipeline.pause(batch_id)
    # Validation and plan go on: they cost little, and what is wrong is known sooner.
    pipeline.validate()
    pipeline.plan()
    assert runnable(pipeline) == []
    pipeline.drain()
    batch = pipeline.batch(batch_id)
    assert (batch.status, batch.completed) == (BatchStatus.IN_PROGRESS, 0)
    pipeline.resume(batch_id)
    assert runnable(pipeline) == ["stub-embed"]
    pipeline.finish(batch_id)
    assert invariants.check(pipeline, batch_id).completed == 1


def test_a_claimed_shard_is_handed_back_with_what_is_finished_flushed(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(NUMBER)])
    pipeline.validate()
    pipeline.plan()
    seen, gate = Counter[str](), threading.Event()

    class HalfWay(Gated):
        def step(self) -> list[object]:  # type: ignore[override]
            if self.counters.requests >= 4:
                gate.clear()
            return list(super().step())

    gate.set()
    engine = HalfWay(seen, gate, results_per_step=4)
    with pipeline.engine(make=lambda: engine) as drain, running(drain.run):
        wait_until(lambda: not gate.is_set())
        pipeline.pause(batch_id)
        # `running` waits for the drain to end: nobody opens the gate.
    batch = pipeline.batch(batch_id)
    assert (batch.status, batch.completed) == (BatchStatus.IN_PROGRESS, 4)
    (shard,) = pipeline.shards(batch_id)
    assert (shard.state, shard.failures, shard.deaths) == (ShardState.READY, 0, 0)
    pipeline.resume(batch_id)
    again: Counter[str] = Counter()
    pipeline.finish(batch_id, make=lambda: Watched(again))
    assert sum(again.values()) == NUMBER - 4
    assert invariants.check(pipeline, batch_id).completed == NUMBER


def test_a_pause_stops_nobody_else(pipeline: Pipeline) -> None:
    resting = pipeline.submit([embedding_line("a")])
    other = pipeline.submit([embedding_line("b")])
    pipeline.pause(resting)
    pipeline.finish(other)
    assert invariants.check(pipeline, other).completed == 1
    assert pipeline.batch(resting).status is BatchStatus.IN_PROGRESS


def test_the_window_of_a_paused_batch_ends_as_any_other(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a"), embedding_line("b")])
    pipeline.validate()
    pipeline.pause(batch_id)
    pipeline.end_window(batch_id)
    pipeline.finish(batch_id)
    batch = invariants.check(pipeline, batch_id)
    assert (batch.status, batch.completed) == (BatchStatus.EXPIRED, 0)


def test_a_paused_batch_can_be_cancelled(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.pause(batch_id)
    pipeline.cancel(batch_id)
    pipeline.finish(batch_id)
    assert invariants.check(pipeline, batch_id).status is BatchStatus.CANCELLED


def test_the_tick_lets_a_paused_batch_rest(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.plan()
    pipeline.pause(batch_id)
    tick.tick(pipeline.resources)
    assert pipeline.batch(batch_id).status is BatchStatus.IN_PROGRESS
    assert [shard.state for shard in pipeline.shards(batch_id)] == [ShardState.READY]


def test_what_is_not_running_cannot_be_paused(pipeline: Pipeline) -> None:
    ended = pipeline.submit([embedding_line("a")])
    pipeline.finish(ended)
    with pytest.raises(Conflict, match="status 'completed'"):
        pipeline.pause(ended)
    # Who has not heard the answer to a resume may ask again when all is done.
    pipeline.resume(ended)
    late = pipeline.submit([embedding_line("a")], window=timedelta(hours=1))
    pipeline.validate()
    pipeline.expire(late)
    for call in (pipeline.pause, pipeline.resume):
        with pytest.raises(Conflict):
            call(late)


def test_over_the_api_the_status_stays_and_twice_is_once(pipeline: Pipeline) -> None:
    resources = pipeline.resources
    with (
        api_over(resources.settings, resources.database, resources.storage) as api,
        api.http() as http,
    ):
        batch_id = MAKERS["batch_id"](http)
        for verb, paused in (("pause", True), ("pause", True), ("resume", False)) * 2:
            answer = http.post(f"/v1/batches/{batch_id}/{verb}")
            assert answer.status_code == 200
            assert answer.json()["status"] == "validating"
            assert answer.json()["halfrate"]["paused"] is paused
        assert http.post("/v1/batches/batch_x/pause").status_code == 404
