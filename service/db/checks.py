"""What in the database does not fit together, and how is it set right?

The same facts that transactions keep as they go, found here from the other end: by reading all of
it. `halfrate doctor` asks; what a function finds, the one after it mends, under the batch's lock
and after looking again, so that doing it beside a running service, or twice, is harmless.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, TextClause, and_, exists, func, or_, select, text, update
from sqlalchemy.orm import Session

from service.batch import RUNNING, BatchStatus, ShardState, StageName
from service.db import queue
from service.db.models import Batch, Shard, Stage, Worker
from service.places import Place

OFTEN = 5
"""A stage that failed so often in a row will not heal by itself."""


@dataclass(frozen=True, slots=True)
class WrongCounts:
    """A batch whose sums are not those of its lines. `lines_missing`: not by counting alone."""

    batch: UUID
    lines_missing: int
    differs: tuple[str, ...]


_SUMMED = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")

# One statement, so one snapshot: a write-back changes lines and counts together.
_COUNTS = """
    SELECT batch.id, batch.total AS stored_total, counted.total AS total,
        batch.completed AS stored_completed, counted.completed AS completed,
        batch.failed AS stored_failed, counted.failed AS failed,
        batch.input_tokens AS stored_input_tokens, counted.input_tokens AS input_tokens,
        batch.cached_tokens AS stored_cached_tokens, counted.cached_tokens AS cached_tokens,
        batch.output_tokens AS stored_output_tokens, counted.output_tokens AS output_tokens
    FROM batches AS batch CROSS JOIN LATERAL (
        SELECT count(*) AS total,
            count(*) FILTER (WHERE state = 'succeeded') AS completed,
            count(*) FILTER (WHERE state = 'failed') AS failed,
            coalesce(sum(input_tokens), 0) AS input_tokens,
            coalesce(sum(cached_tokens), 0) AS cached_tokens,
            coalesce(sum(output_tokens), 0) AS output_tokens
        FROM request_lines WHERE batch_id = batch.id
    ) AS counted
    WHERE batch.in_progress_at IS NOT NULL AND batch.deleted_at IS NULL
"""
_ALL_COUNTS = text(
    f"""{_COUNTS} AND (batch.total, batch.completed, batch.failed, batch.input_tokens,
        batch.cached_tokens, batch.output_tokens)
    IS DISTINCT FROM (counted.total, counted.completed, counted.failed, counted.input_tokens,
        counted.cached_tokens, counted.output_tokens)
    ORDER BY batch.id"""
)
_COUNTS_OF_ONE = text(f"{_COUNTS} AND batch.id = :batch_id")


def wrong_counts(session: Session) -> list[WrongCounts]:
    """Batches whose counts or token sums differ from those of their lines."""
    return [
        WrongCounts(row.id, row.stored_total - row.total, _differences(row))
        for row in session.execute(_ALL_COUNTS)
    ]


def _differences(row: Row[Any]) -> tuple[str, ...]:
    return tuple(
        f"{name} {getattr(row, f'stored_{name}')}, by its lines {getattr(row, name)}"
        for name in ("total", *_SUMMED)
        if getattr(row, f"stored_{name}") != getattr(row, name)
    )


def recount(session: Session, batch_id: UUID) -> None:
    """The counts and token sums of a batch anew, from its lines."""
    queue.lock_batch(session, batch_id)
    row = session.execute(_COUNTS_OF_ONE, {"batch_id": batch_id}).one()
    counted = {name: getattr(row, name) for name in _SUMMED}
    session.execute(update(Batch).where(Batch.id == batch_id).values(counted))


def leases_past(session: Session, now: datetime) -> int:
    """Claims whose lease has run out and that nobody took back (`queue.reap` does)."""
    return sum(
        session.execute(
            select(func.count())
            .select_from(table)
            .where(table.state == ShardState.LEASED, table.lease_expires_at <= now)
        ).scalar_one()
        for table in queue.CLAIMABLE
    )


def held_by_nobody(session: Session, heard_since: datetime) -> list[tuple[str, int]]:
    """Workers that hold shards and were not heard of since then: name, number of shards."""
    alive = exists().where(Worker.name == Shard.worker, Worker.heartbeat_at >= heard_since)
    rows = session.execute(
        select(Shard.worker, func.count())
        .where(Shard.state == ShardState.LEASED, ~alive)
        .group_by(Shard.worker)
        .order_by(Shard.worker)
    )
    return [(name or "?", number) for name, number in rows]


def unserved(session: Session, now: datetime, heard_since: datetime) -> list[str]:
    """Models that have runnable shards and no living worker."""
    served = set(
        session.scalars(
            select(func.unnest(Worker.models)).where(Worker.heartbeat_at >= heard_since)
        )
    )
    return [model for model in queue.runnable_models(session, now) if model not in served]


def failing_stages(session: Session) -> list[tuple[UUID, StageName, int]]:
    """Stages that fail again and again: batch, which, how often."""
    rows = session.execute(
        select(Stage.batch_id, Stage.name, Stage.failures)
        .where(Stage.failures >= OFTEN, Stage.state.in_([ShardState.READY, ShardState.LEASED]))
        .order_by(Stage.failures.desc(), Stage.batch_id)
    )
    return [(row.batch_id, row.name, row.failures) for row in rows]


# Of batches that are planned and running: what is pending must stand in a shard to be run.
_LOST = """
    SELECT lost.batch_id, lost.line FROM (
        SELECT line.batch_id, line.line FROM request_lines AS line
        JOIN batches AS batch ON batch.id = line.batch_id
        JOIN stages AS plan ON plan.batch_id = batch.id
            AND plan.name = 'plan' AND plan.state = 'done'
        WHERE line.state = 'pending' AND batch.status = 'in_progress' AND batch.frozen_at IS NULL
            AND (CAST(:batch_id AS uuid) IS NULL OR batch.id = :batch_id)
    ) AS lost
    LEFT JOIN (
        SELECT batch_id, unnest(lines) AS line FROM shards WHERE state IN ('ready', 'leased')
    ) AS open ON open.batch_id = lost.batch_id AND open.line = lost.line
    WHERE open.line IS NULL
"""
_LOST_BY_BATCH = text(
    f"SELECT batch_id, count(*) AS number FROM ({_LOST}) AS each GROUP BY 1 ORDER BY 1"  # noqa: S608 - ours
)
_LOST_BY_MODEL = text(
    f"""SELECT shard.model, array_agg(DISTINCT each.line) AS lines, max(shard.cost) AS cost
    FROM ({_LOST}) AS each
    JOIN (SELECT batch_id, model, cost, unnest(lines) AS line FROM shards) AS shard
        ON shard.batch_id = each.batch_id AND shard.line = each.line
    GROUP BY shard.model ORDER BY shard.model"""  # noqa: S608 - ours
)


def lines_without_shard(session: Session) -> list[tuple[UUID, int]]:
    """Running batches with lines that nobody will ever run: batch, how many."""
    rows = session.execute(_LOST_BY_BATCH, {"batch_id": None})
    return [(row.batch_id, row.number) for row in rows]


def shard_anew(session: Session, batch_id: UUID, now: datetime) -> None:
    """Put such lines into new shards, a model each."""
    queue.lock_batch(session, batch_id)
    rows = session.execute(_LOST_BY_MODEL, {"batch_id": batch_id}).all()
    shards = [queue.NewShard(row.model, row.lines, row.cost) for row in rows]
    queue.add_shards(session, batch_id, shards, not_before=now)


def unassembled(session: Session) -> list[UUID]:
    """Batches that are decided, and that no stage is there to assemble."""
    coming = exists().where(
        Stage.batch_id == Batch.id,
        Stage.name == StageName.ASSEMBLE,
        Stage.state.in_([ShardState.READY, ShardState.LEASED]),
    )
    return list(session.scalars(select(Batch.id).where(_decided(), ~coming).order_by(Batch.id)))


def _decided() -> ColumnElement[bool]:
    open_still = Batch.status.in_([*RUNNING, BatchStatus.CANCELLING])
    return or_(
        Batch.status == BatchStatus.FINALIZING, and_(open_still, Batch.frozen_at.is_not(None))
    )


def assemble_anew(session: Session, batch_id: UUID, now: datetime) -> None:
    """Give such a batch its assemble stage, again where there is one that is said to be over."""
    queue.lock_batch(session, batch_id)
    if batch_id not in unassembled(session):
        return
    queue.add_stage(session, batch_id, StageName.ASSEMBLE, now)
    queue.revive_stage(session, batch_id, StageName.ASSEMBLE, now)


# One statement, so one snapshot: a part may be recorded, or a claim end, at any moment. Wanted is
# what has its row, or whose attempt still stands and may yet write the row, or what the batch's
# clean stage is to remove anyway.
_UNWANTED_PARTS = text(
    """
    SELECT place.key FROM unnest(
        CAST(:keys AS text[]), CAST(:batches AS uuid[]), CAST(:shards AS uuid[]),
        CAST(:attempts AS integer[])
    ) AS place(key, batch, shard, attempt)
    WHERE NOT EXISTS (SELECT FROM parts WHERE storage_key = place.key)
        AND NOT EXISTS (
            SELECT FROM shards WHERE id = place.shard AND attempt = place.attempt
                AND state = 'leased'
        )
        AND NOT EXISTS (
            SELECT FROM stages WHERE batch_id = place.batch AND name = 'clean'
                AND state IN ('ready', 'leased')
        )
    """
)
_UNWANTED_RESULTS = text(
    """
    SELECT place.key FROM unnest(
        CAST(:keys AS text[]), CAST(:batches AS uuid[]), CAST(:shards AS uuid[]),
        CAST(:attempts AS integer[])
    ) AS place(key, batch, shard, attempt)
    WHERE NOT EXISTS (SELECT FROM files WHERE storage_key = place.key)
        AND NOT EXISTS (
            SELECT FROM stages WHERE batch_id = place.batch AND name = 'assemble'
                AND attempt = place.attempt AND state = 'leased'
        )
        AND NOT EXISTS (
            SELECT FROM stages WHERE batch_id = place.batch AND name = 'clean'
                AND state IN ('ready', 'leased')
        )
    """
)


def unwanted_parts(session: Session, places: Sequence[Place]) -> list[str]:
    """Of these parts in the store, those that no row names, nor ever will: their keys."""
    return _unwanted(session, _UNWANTED_PARTS, places)


def unwanted_results(session: Session, places: Sequence[Place]) -> list[str]:
    """The same of result files."""
    return _unwanted(session, _UNWANTED_RESULTS, places)


def _unwanted(session: Session, statement: TextClause, places: Sequence[Place]) -> list[str]:
    given = {
        "keys": [place.key for place in places],
        "batches": [place.batch for place in places],
        "shards": [place.shard for place in places],
        "attempts": [place.attempt for place in places],
    }
    return list(session.execute(statement, given).scalars())
