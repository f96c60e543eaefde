"""How much is there to do, and how long has it waited? Counts that indexes and sums answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.batch import BatchStatus, LineState, ShardState
from service.db.models import Batch, Shard
from service.db.queue import runnable


@dataclass(frozen=True, slots=True)
class Queue:
    """One model's shards: how many could be claimed now, how many are, and for how many seconds
    the longest-waiting of the first kind has been ready."""

    runnable: int = 0
    running: int = 0
    age_s: float = 0.0


def batches_by_status(session: Session) -> Mapping[BatchStatus, int]:
    """All batches there are, ended ones included."""
    rows = session.execute(select(Batch.status, func.count()).group_by(Batch.status))
    return dict.fromkeys(BatchStatus, 0) | {row[0]: row[1] for row in rows}


def lines_of_open_batches(session: Session) -> Mapping[LineState, int]:
    """Lines of the batches that run, are cancelled or have their files made, by what became of
    them: sums over the batches' own counts."""
    total, succeeded, failed = session.execute(
        select(
            func.coalesce(func.sum(Batch.total), 0),
            func.coalesce(func.sum(Batch.completed), 0),
            func.coalesce(func.sum(Batch.failed), 0),
        ).where(
            Batch.status.in_(
                [BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING]
            ),
            Batch.in_progress_at.is_not(None),
        )
    ).one()
    return {
        LineState.PENDING: total - succeeded - failed,
        LineState.SUCCEEDED: succeeded,
        LineState.FAILED: failed,
    }


def queues(session: Session, now: datetime) -> Mapping[str, Queue]:
    """Each model that has shards to run or running."""
    waiting = session.execute(
        select(Shard.model, func.count(), func.min(Shard.not_before))
        .join(Batch, Batch.id == Shard.batch_id)
        .where(runnable(now))
        .group_by(Shard.model)
    )
    held = session.execute(
        select(Shard.model, func.count())
        .where(Shard.state == ShardState.LEASED)
        .group_by(Shard.model)
    )
    found = {
        model: Queue(runnable=number, age_s=(now - since).total_seconds())
        for model, number, since in waiting
    }
    for model, number in held:
        before = found.get(model, Queue())
        found[model] = Queue(before.runnable, number, before.age_s)
    return found
