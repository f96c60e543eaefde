"""Does a batch come to its end, whatever moment a worker dies at?"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

import pytest

from service.batch import BatchStatus, LineState
from service.db import batches, lines, queue
from service.storage import Storage
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Watched
from worker import assemble, execute, plan, validate, write_back

NUMBER = 24


class Death(BaseException):
    """The process is gone: nothing catches this, nothing is handed back."""


def submitted(pipeline: Pipeline) -> UUID:
    return pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(NUMBER)])


def die(*_: object, **__: object) -> None:
    raise Death


def dies_after(real: Callable[..., object], times: int = 1) -> Callable[..., object]:
    """What `real` does, and death once it was done so often."""
    done = Counter[str]()

    def once(*given: object, **named: object) -> object:
        result = real(*given, **named)
        done["calls"] += 1
        if done["calls"] == times:
            raise Death
        return result

    return once


def run_until_death(pipeline: Pipeline, seen: Counter[str]) -> None:
    """One worker goes the whole way, as far as it gets."""
    with suppress(Death):
        pipeline.validate()
        pipeline.plan()
        pipeline.drain(make=lambda: Watched(seen))
        pipeline.assemble()
        pipeline.clean()


MOMENTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "validate claimed": (validate, "_with_input", die),
    "lines copied, not committed": (validate, "_check_whole", die),
    "plan claimed": (plan, "cut", die),
    "plan settled, shards not committed": (queue, "add_shards", die),
    "shard claimed": (execute.ShardRun, "run", die),
    "lines submitted": (execute.ShardRun, "_collect", die),
    "part put, not recorded": (Storage, "put", dies_after(Storage.put, 2)),
    "part recorded, not committed": (lines, "record", dies_after(lines.record)),
    "first flush committed": (execute, "flush", dies_after(write_back.flush)),
    "third flush committed": (execute, "flush", dies_after(write_back.flush, 3)),
    "all flushed, not settled": (execute.ShardRun, "_settle", die),
    "last shard settled, not committed": (batches, "advance", die),
    "assemble claimed": (assemble, "assemble", die),
    "results opened": (assemble, "_write", die),
    "in the middle of the merge": (assemble, "decode", dies_after(write_back.decode, 5)),
    "both files written, not published": (assemble, "_publish", die),
    "published, not committed": (batches, "end", dies_after(batches.end)),
}


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_batch_survives_the_death_of_its_worker(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner, name, deadly = MOMENTS[moment]
    eager = pipeline.having(flush_s=0.000_001, shard_s=0.05)
    batch_id = submitted(eager)
    seen: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly)
        run_until_death(eager, seen)
    before = eager.batch(batch_id)
    assert before.status is not BatchStatus.COMPLETED, "it did not die"
    flushed = {
        f"text {row.custom_id}"
        for row in eager.line_rows(batch_id)
        if row.state is LineState.SUCCEEDED
    }
    eager.lose_workers()
    again: Counter[str] = Counter()
    eager.finish(batch_id, make=lambda: Watched(again))
    batch = invariants.check(eager, batch_id)
    assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, NUMBER)
    assert flushed.isdisjoint(again)
    assert flushed | set(again) == {f"text {n}" for n in range(NUMBER)}


def test_a_worker_that_dies_every_time_is_survived_by_one_that_does_not(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = pipeline.having(flush_s=0.000_001)
    batch_id = submitted(eager)
    for _ in range(6):
        with monkeypatch.context() as patch:
            patch.setattr(execute, "flush", die)
            run_until_death(eager, Counter())
        eager.lose_workers()
    (shard,) = eager.shards(batch_id)
    assert (shard.deaths, shard.failures) == (6, 0)
    eager.finish(batch_id)
    # A lost worker uses up no line's attempts.
    assert invariants.check(eager, batch_id).completed == NUMBER
    assert {row.attempts for row in eager.line_rows(batch_id)} == {1}


def test_the_death_of_the_cleaner_leaves_the_cleaning_to_another(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submitted(pipeline)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", dies_after(Storage.delete))
        run_until_death(pipeline, Counter())
    assert pipeline.batch(batch_id).status is BatchStatus.COMPLETED
    pipeline.lose_workers()
    pipeline.clean()
    invariants.check(pipeline, batch_id)
