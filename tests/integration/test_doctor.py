"""Does the doctor find what is wrong, mend what can be, and leave a healthy service alone?"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import delete, text, update
from structlog.testing import capture_logs

from service import doctor
from service.batch import BatchStatus, ShardState, StageName
from service.db import session, workers
from service.db.models import Batch, RequestLine, Shard, Stage
from service.db.workers import Figures
from service.doctor import Finding, Patient
from service.ids import Prefix, new_id, show
from service.places import part_key, parts_prefix, read_key, result_key
from service.settings import MIB
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from worker import assemble, tick, write_back


@pytest.fixture
def small(pipeline: Pipeline) -> Pipeline:
    """Several shards a batch, written back as they go; a worker that serves the model is alive.
    The bucket, which tests share, holds nothing of other tests."""
    pipeline.resources.storage.delete(pipeline.resources.storage.list(""))
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        workers.beat(transaction, pipeline.resources.name, {"stub-embed": Figures()}, now)
    return pipeline.having(shard_s=0.002, flush_s=0.000_001)


def submitted(pipeline: Pipeline, number: int = 9) -> UUID:
    return pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(number)])


def findings(pipeline: Pipeline) -> list[Finding]:
    resources = pipeline.resources
    patient = Patient(resources.database, resources.storage, resources.settings.lease)
    return list(doctor.examine(patient))


def mended(pipeline: Pipeline, *checks: str) -> str:
    """These, and no others, were found; they are mended, and then nothing is. What was said."""
    found = findings(pipeline)
    assert [each.check for each in found] == list(checks), found
    for each in found:
        assert each.mend is not None, each
        each.mend()
    assert findings(pipeline) == []
    return " ".join(each.what for each in found)


STEPS: list[Callable[[Pipeline], None]] = [
    Pipeline.validate,
    Pipeline.plan,
    Pipeline.drain_one,
    Pipeline.drain_one,
    Pipeline.drain,
    Pipeline.assemble,
    Pipeline.clean,
]


def test_of_a_healthy_service_there_is_nothing_to_say(small: Pipeline) -> None:
    batch_id = submitted(small)
    for step in STEPS:
        assert findings(small) == []
        step(small)
    assert findings(small) == []
    invariants.check(small, batch_id)
    for end in (small.cancel, small.expire):
        other = submitted(small)
        small.validate()
        small.plan()
        small.drain_one()
        end(other)
        small.finish(other)
        assert findings(small) == []
    small.delete(batch_id)
    assert findings(small) == []
    small.remove()
    assert findings(small) == []


def test_what_a_living_worker_is_at_is_left_alone(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part put and result written, neither recorded yet: the claims stand."""
    batch_id = submitted(small)
    seen: list[Finding] = []

    def looked(real: Callable[..., object]) -> Callable[..., object]:
        def look(*given: object, **named: object) -> object:
            seen.extend(findings(small))
            return real(*given, **named)

        return look

    monkeypatch.setattr(write_back.lines, "record", looked(write_back.lines.record))
    monkeypatch.setattr(assemble, "_publish", looked(assemble._publish))
    small.finish(batch_id)
    assert seen == []
    invariants.check(small, batch_id)


def test_wrong_counts_are_counted_anew(small: Pipeline) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    small.drain_one()
    before = small.batch(batch_id)
    with small.resources.database.transaction() as transaction:
        transaction.execute(update(Batch).values(completed=0, failed=1, input_tokens=7))
    said = mended(small, "counts")
    assert f"{show(Prefix.BATCH, batch_id)}: completed 0, by its lines {before.completed}" in said
    small.finish(batch_id)
    invariants.check(small, batch_id)


def test_lines_that_are_missing_are_for_a_person(small: Pipeline) -> None:
    submitted(small)
    small.validate()
    with small.resources.database.transaction() as transaction:
        transaction.execute(delete(RequestLine).where(RequestLine.line == 3))
    (found,) = findings(small)
    assert (found.check, found.mend) == ("counts", None)
    assert "total 9, by its lines 8" in found.what


def test_leases_that_ran_out_are_taken_back(small: Pipeline) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    _claimed(small)
    with small.resources.database.transaction() as transaction:
        past = session.now(transaction) - timedelta(seconds=1)
        transaction.execute(
            update(Shard).where(Shard.state == ShardState.LEASED).values(lease_expires_at=past)
        )
    mended(small, "leases")
    small.finish(batch_id)
    assert invariants.check(small, batch_id).completed == 9


def _claimed(pipeline: Pipeline) -> None:
    with pipeline.engine() as drain:
        assert drain._claim() is not None


def test_workers_that_are_gone_are_named(small: Pipeline) -> None:
    submitted(small)
    small.validate()
    small.plan()
    _claimed(small)
    with small.resources.database.transaction() as transaction:
        workers.leave(transaction, small.resources.name)
    held, unserved = findings(small)
    assert (held.check, held.mend) == ("leases", None)
    assert small.resources.name in held.what
    assert (unserved.check, unserved.mend) == ("workers", None)
    assert unserved.what == "stub-embed has lines to run and no worker"


def test_a_window_that_nobody_ended_is_ended(small: Pipeline) -> None:
    batch_id = submitted(small)
    small.validate()
    small.end_window(batch_id)
    mended(small, "batches")
    small.finish(batch_id)
    assert invariants.check(small, batch_id).status is BatchStatus.EXPIRED


def test_a_batch_that_nobody_closed_is_closed(small: Pipeline) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    small.drain()
    with small.resources.database.transaction() as transaction:
        transaction.execute(delete(Stage).where(Stage.name == StageName.ASSEMBLE))
        transaction.execute(update(Batch).values(status="in_progress", finalizing_at=None))
    mended(small, "batches")
    small.assemble()
    small.clean()
    invariants.check(small, batch_id)


@pytest.mark.parametrize("how", ["tick", "doctor"])
@pytest.mark.parametrize("left", ["none", "done", "dead"])
def test_a_decided_batch_gets_its_assemble_stage(small: Pipeline, how: str, left: str) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    small.drain()
    assert small.batch(batch_id).status is BatchStatus.FINALIZING
    with small.resources.database.transaction() as transaction:
        mine = Stage.name == StageName.ASSEMBLE
        if left == "none":
            transaction.execute(delete(Stage).where(mine))
        else:
            transaction.execute(update(Stage).where(mine).values(state=left, attempt=4))
    if how == "tick":
        tick.close_stalled(small.resources.database)
        assert findings(small) == []
    else:
        mended(small, "batches")
    small.assemble()
    small.clean()
    invariants.check(small, batch_id)
    (key,) = small.resources.storage.list(f"results/{batch_id.hex}/")
    assert key == result_key(batch_id, "output", 1 if left == "none" else 5)


def test_lines_in_no_shard_get_one_of_their_model(small: Pipeline) -> None:
    batch_id = small.submit(
        [embedding_line("a"), embedding_line("b", model="stub-other"), embedding_line("c")]
    )
    small.validate()
    small.plan()
    with small.resources.database.transaction() as transaction:
        now = session.now(transaction)
        figures = {"stub-embed": Figures(), "stub-other": Figures()}
        workers.beat(transaction, small.resources.name, figures, now)
        transaction.execute(update(Shard).values(state=ShardState.DEAD))
    said = mended(small, "batches")
    assert "3 lines stand in no shard" in said
    small.finish(batch_id, "stub-embed", "stub-other")
    assert invariants.check(small, batch_id).completed == 3


def test_a_stage_that_fails_again_and_again_is_shown(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    small.drain()

    def broken(*_: object, **__: object) -> None:
        raise ValueError("made up")

    with monkeypatch.context() as patch, capture_logs() as logged:
        patch.setattr(assemble, "_write", broken)
        for _ in range(5):
            assert findings(small) == []
            small.skip_waits()
            small.assemble()
    errors = [each for each in logged if each["event"] == "stage keeps failing"]
    assert [(each["log_level"], each["failures"]) for each in errors] == [("error", 5)]
    (found,) = findings(small)
    assert (found.check, found.mend) == ("stages", None)
    assert found.what == f"{show(Prefix.BATCH, batch_id)}: assemble failed 5 times"
    small.finish(batch_id)
    invariants.check(small, batch_id)


def test_parts_and_results_without_a_row_are_removed_and_no_other(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a running batch and of ended ones; of a batch that nobody knows."""
    storage = small.resources.storage
    ended = submitted(small)
    small.finish(ended)
    running = submitted(small)
    small.validate()
    small.plan()

    def dies(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(write_back.lines, "record", dies)
        small.drain_one()
    orphan = list(storage.list(parts_prefix(running.hex)))
    assert len(orphan) == 1
    small.lose_workers()
    small.skip_waits()
    small.drain_one()
    published = list(storage.list(f"results/{ended.hex}/"))
    recorded = set(storage.list(parts_prefix(running.hex))) - set(orphan)
    assert recorded
    strays = [
        part_key(ended, new_id(), 1, 0),
        part_key(new_id(), new_id(), 2, 3),
        result_key(ended, "error", 7),
        result_key(running, "output", 1),
    ]
    for key in strays:
        storage.put(key, b"x")
    storage.put("parts/of somebody else", b"x")
    mended(small, "parts", "results")
    assert list(storage.list(f"results/{ended.hex}/")) == published
    assert set(storage.list("parts/")) == {*recorded, "parts/of somebody else"}
    storage.delete(["parts/of somebody else"])
    small.finish(running)
    invariants.check(small, running)
    invariants.check(small, ended)


def test_abandoned_uploads_are_given_up(small: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small.resources.storage.writer("files/abandoned")
    writer.write(b"x" * (9 * MIB))
    assert findings(small) == []
    monkeypatch.setattr(doctor, "ABANDONED_AFTER", timedelta(seconds=-60))
    mended(small, "uploads")


def test_a_key_says_whose_it_is() -> None:
    batch, shard = new_id(), new_id()
    part, result = read_key(part_key(batch, shard, 3, 1)), read_key(result_key(batch, "output", 2))
    assert part is not None
    assert (part.batch, part.shard, part.attempt) == (batch, shard, 3)
    assert result is not None
    assert (result.batch, result.shard, result.attempt) == (batch, None, 2)
    assert read_key("files/a/b") is None


def test_mending_twice_or_too_late_is_harmless(small: Pipeline) -> None:
    batch_id = submitted(small)
    small.validate()
    small.plan()
    small.drain()
    with small.resources.database.transaction() as transaction:
        transaction.execute(delete(Stage).where(Stage.name == StageName.ASSEMBLE))
        transaction.execute(text("UPDATE batches SET completed = 1"))
    found = findings(small)
    assert [each.check for each in found] == ["counts", "batches"]
    for _ in range(2):
        for each in found:
            assert each.mend is not None
            each.mend()
    small.assemble()
    small.clean()
    for each in found:
        assert each.mend is not None
        each.mend()
    assert findings(small) == []
    invariants.check(small, batch_id)
    assert small.open_stages(batch_id) == []
