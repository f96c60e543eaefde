"""Do the database and the statements on it allow the legal moves and nothing else?"""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from service.batch import MOVES, BatchStatus, IllegalMove, ShardState, StageName
from service.db import batches, queue, session
from service.ids import new_id
from tests.pipeline import Pipeline, embedding_line

# What a row in each state has to hold, beside its status.
STAMPS = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}

CHANGE = "UPDATE batches SET {} WHERE id = :id"


def put(pipeline: Pipeline, batch_id: Any, status: BatchStatus) -> None:
    """Set the state past the code that guards it."""
    stamp = f", {STAMPS[status]} = now()" if status in STAMPS else ""
    change = f"status = '{status}'{stamp}"
    run(pipeline, CHANGE.format(change), id=batch_id)


def run(pipeline: Pipeline, statement: str, **values: object) -> None:
    with pipeline.resources.database.transaction() as transaction:
        transaction.execute(text(statement), values)


@pytest.mark.parametrize("to", [status for status in BatchStatus if status != "validating"])
@pytest.mark.parametrize("status", BatchStatus)
def test_a_batch_moves_exactly_as_the_table_of_moves_says(
    pipeline: Pipeline, status: BatchStatus, to: BatchStatus
) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    put(pipeline, batch_id, status)
    database = pipeline.resources.database
    if to in MOVES[status]:
        with database.transaction() as transaction:
            batches.move(transaction, batch_id, to, session.now(transaction))
        moved = pipeline.batch(batch_id)
        assert moved.status is to
        assert getattr(moved, f"{to}_at") is not None
    else:
        with pytest.raises(IllegalMove), database.transaction() as transaction:
            batches.move(transaction, batch_id, to, session.now(transaction))
        assert pipeline.batch(batch_id).status is status


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ("status = 'completed'", "ck_batches_completed"),
        ("completed_at = now()", "ck_batches_completed"),
        ("status = 'failed'", "ck_batches_failed"),
        ("status = 'expired'", "ck_batches_expired"),
        ("status = 'cancelled'", "ck_batches_cancelled"),
        ("cancelled_at = now()", "ck_batches_cancelled"),
        ("status = 'running'", "ck_batches_status"),
        ("output_file_id = input_file_id", "ck_batches_files_when_ended"),
        ("error_file_id = input_file_id", "ck_batches_files_when_ended"),
        ("completed = 2", "ck_batches_counts"),
        ("completed = 1, failed = 1", "ck_batches_counts"),
        ("failed = -1", "ck_batches_counts_positive"),
        ("input_file_id = id", "fk_batches_input_file_id"),
    ],
)
def test_the_database_refuses_a_batch_that_cannot_be(
    pipeline: Pipeline, changes: str, constraint: str
) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    pipeline.validate()
    with pytest.raises(IntegrityError, match=constraint):
        run(pipeline, CHANGE.format(changes), id=batch_id)


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("UPDATE shards SET state = 'leased'", "ck_shards_leased"),
        ("UPDATE shards SET lease_expires_at = now()", "ck_shards_leased"),
        ("UPDATE shards SET lines = '{}'", "ck_shards_lines"),
        ("UPDATE shards SET state = 'lost'", "ck_shards_state"),
        ("UPDATE stages SET state = 'leased'", "ck_stages_leased"),
        ("UPDATE stages SET name = 'guess'", "ck_stages_name"),
        ("UPDATE request_lines SET state = 'succeeded'", "ck_request_lines_answered"),
        ("UPDATE request_lines SET state = 'odd'", "ck_request_lines_state"),
        ("UPDATE request_lines SET part_id = batch_id", "ck_request_lines_answered"),
        ("UPDATE files SET bytes = -1", "ck_files_bytes"),
        (
            "INSERT INTO request_lines (batch_id, line, custom_id, byte_offset, byte_length)"
            " SELECT batch_id, line, 'again', 0, 1 FROM request_lines",
            "pk_request_lines",
        ),
        (
            "INSERT INTO shards (id, batch_id, ordinal, model, lines, cost, state, attempt,"
            " not_before, failures, deaths) SELECT gen_random_uuid(), batch_id, ordinal, model,"
            " lines, cost, state, attempt, not_before, failures, deaths FROM shards",
            "uq_shards_batch_id_ordinal",
        ),
    ],
)
def test_the_database_refuses_rows_that_cannot_be(
    pipeline: Pipeline, statement: str, constraint: str
) -> None:
    pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.plan()
    with pytest.raises(IntegrityError, match=constraint):
        run(pipeline, statement)


def test_the_same_part_cannot_stand_twice_nor_a_ledger_entry_fall_below_nothing(
    pipeline: Pipeline,
) -> None:
    pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    with pytest.raises(IntegrityError, match="uq_parts_shard_id_attempt_sequence"):
        run(
            pipeline,
            "INSERT INTO parts SELECT gen_random_uuid(), batch_id, shard_id, attempt, sequence,"
            " 'other', bytes, lines, created_at FROM parts",
        )
    with pytest.raises(IntegrityError, match="ck_usage_ledger_tokens"):
        run(pipeline, "UPDATE usage_ledger SET output_tokens = -1")


def test_a_stage_is_added_once(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        for _ in range(3):
            queue.add_stage(transaction, batch_id, StageName.VALIDATE, now)
    assert pipeline.open_stages(batch_id) == [StageName.VALIDATE]


def test_the_earliest_deadline_is_claimed_first_then_plan_order(pipeline: Pipeline) -> None:
    many = pipeline.having(shard_s=0.001)
    late = many.submit([embedding_line(f"{n}") for n in range(3)], window=timedelta(hours=9))
    soon = many.submit([embedding_line(f"{n}") for n in range(3)], window=timedelta(hours=1))
    many.validate()
    many.plan()
    claimed = []
    while (shard := claim(many)) is not None:
        claimed.append((shard.lease.batch_id, shard.lines))
    assert claimed == [(batch, (line,)) for batch in (soon, late) for line in (1, 2, 3)]


def test_a_claim_passes_over_what_must_not_run_now(pipeline: Pipeline) -> None:
    waiting, ended = (pipeline.submit([embedding_line("a")]) for _ in range(2))
    pipeline.validate()
    pipeline.plan()
    run(
        pipeline,
        "UPDATE shards SET not_before = now() + interval '1 hour' WHERE batch_id = :id",
        id=waiting,
    )
    pipeline.end_window(ended)
    assert claim(pipeline) is None
    with pipeline.resources.database.transaction() as transaction:
        assert queue.runnable_models(transaction, session.now(transaction)) == []


def test_a_shard_of_another_model_is_not_claimed(pipeline: Pipeline) -> None:
    pipeline.submit([embedding_line("a", model="stub-other")])
    pipeline.validate()
    pipeline.plan()
    assert claim(pipeline) is None
    shard = claim(pipeline, "stub-other")
    assert shard is not None
    assert (shard.model, shard.lease.attempt) == ("stub-other", 1)


def claim(pipeline: Pipeline, model: str = "stub-embed") -> queue.ClaimedShard | None:
    with pipeline.resources.database.transaction() as transaction:
        return queue.claim_shard(
            transaction,
            model,
            worker="test",
            now=session.now(transaction),
            lease=timedelta(seconds=30),
        )


def test_a_claim_that_another_transaction_holds_is_passed_over(pipeline: Pipeline) -> None:
    many = pipeline.having(shard_s=0.001)
    many.submit([embedding_line("a"), embedding_line("b")])
    many.validate()
    many.plan()
    with many.resources.database.transaction() as transaction:
        first = queue.claim_shard(
            transaction,
            "stub-embed",
            worker="one",
            now=session.now(transaction),
            lease=timedelta(seconds=30),
        )
        second = claim(many)
        assert claim(many) is None
    assert first is not None
    assert second is not None
    assert first.lease.id != second.lease.id


def test_a_backoff_grows_with_every_failure_up_to_its_most(pipeline: Pipeline) -> None:
    pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.plan()
    waits = []
    for _ in range(8):
        pipeline.skip_waits()
        shard = claim(pipeline)
        assert shard is not None
        with pipeline.resources.database.transaction() as transaction:
            now = session.now(transaction)
            queue.give_up(transaction, shard.lease, now=now)
        with pipeline.resources.database.transaction() as transaction:
            row = transaction.execute(text("SELECT not_before, failures FROM shards")).one()
        waits.append((row.not_before - now).total_seconds())
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_shard_row_that_ended_is_never_claimed_again(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    assert [shard.state for shard in pipeline.shards(batch_id)] == [ShardState.DONE]
    assert claim(pipeline) is None


def test_a_batch_of_another_project_is_not_there(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    with pipeline.resources.database.transaction() as transaction:
        assert batches.get(transaction, new_id(), batch_id) is None
        now = session.now(transaction)
        assert batches.cancel(transaction, new_id(), batch_id, now) is None
    assert pipeline.batch(batch_id).status is BatchStatus.VALIDATING
