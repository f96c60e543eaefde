"""How does a batch come to be, move, and end?

Every change of status goes through `move`, which knows only the legal moves. What closes a batch
(the last shard, a cancel, the clock) freezes its unfinished lines and adds the assemble stage; the
terminal status itself is written by `end`, together with the files.
"""

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, and_, exists, null, or_, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.orm import Session

from service import wire
from service.batch import (
    RUNNING,
    TERMINAL,
    BatchStatus,
    IllegalMove,
    LineState,
    ShardState,
    StageName,
    before,
)
from service.db import files, lines, queue, webhooks
from service.db.models import ApiKey, Batch, File, Part, Shard, Stage
from service.errors import Conflict
from service.ids import new_id
from service.webhook import EVENT_OF

_STAMPS = {
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


def create(
    session: Session,
    *,
    project_id: UUID,
    endpoint: str,
    input_file_id: UUID,
    completion_window: str,
    window: timedelta,
    metadata: dict[str, str] | None,
    output_expires_after_s: int | None,
    now: datetime,
    retry_of: UUID | None = None,
) -> Batch:
    """A new batch, with its validate stage ready. A retry takes over another one's lines there."""
    batch = Batch(
        id=new_id(),
        project_id=project_id,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=completion_window,
        metadata_=metadata,
        output_expires_after_s=output_expires_after_s,
        status=BatchStatus.VALIDATING,
        created_at=now,
        expires_at=now + window,
        retry_of=retry_of,
    )
    session.add(batch)
    session.flush()
    queue.add_stage(session, batch.id, StageName.VALIDATE, now)
    return batch


def get(session: Session, project_id: UUID, batch_id: UUID) -> Batch | None:
    """The project's batch of that id."""
    return session.scalar(
        select(Batch).where(_is(project_id, batch_id), Batch.deleted_at.is_(None))
    )


def of_key(batch_id: UUID) -> ColumnElement[bool]:
    """Ties a batch to the key of the project that it is of."""
    return and_(
        Batch.id == batch_id,
        Batch.project_id == ApiKey.project_id,
        Batch.deleted_at.is_(None),
    )


def was_ever(session: Session, project_id: UUID, batch_id: UUID) -> bool:
    """Whether the id may stand as a page's `after`: deleted meanwhile is fine, or a client that
    deletes what it lists could not turn the page."""
    return session.scalar(select(Batch.id).where(_is(project_id, batch_id))) is not None


def _is(project_id: UUID, batch_id: UUID) -> ColumnElement[bool]:
    return and_(Batch.id == batch_id, Batch.project_id == project_id)


def _lock_own(session: Session, project_id: UUID, batch_id: UUID) -> Batch | None:
    """As `get`, locked until commit."""
    if get(session, project_id, batch_id) is None:
        return None
    batch = queue.lock_batch(session, batch_id)
    return batch if batch.deleted_at is None else None


def page(session: Session, project_id: UUID, *, after: UUID | None, limit: int) -> list[Batch]:
    """At most `limit` batches, newest first, older than `after`."""
    query = select(Batch).where(Batch.project_id == project_id, Batch.deleted_at.is_(None))
    if after is not None:
        query = query.where(Batch.id < after)
    return list(session.scalars(query.order_by(Batch.id.desc()).limit(limit)))


def move(session: Session, batch_id: UUID, to: BatchStatus, now: datetime) -> None:
    """Change the status and stamp it; the project's webhooks hear of an end.

    Raises IllegalMove where MOVES does not allow it.
    """
    moved = session.execute(
        update(Batch)
        .where(Batch.id == batch_id, Batch.status.in_(before(to)))
        .values({"status": to, _STAMPS[to]: now})
        .returning(Batch.id)
    ).scalar()
    if moved is None:
        raise IllegalMove(to)
    if to in TERMINAL:
        webhooks.announce(session, batch_id, EVENT_OF[to], now)


def cancel(session: Session, project_id: UUID, batch_id: UUID, now: datetime) -> Batch | None:
    """Ask for the end of a batch; a second time changes nothing. Raises Conflict once it ended."""
    batch = _lock_own(session, project_id, batch_id)
    if batch is None:
        return None
    if batch.status in {BatchStatus.CANCELLING, BatchStatus.CANCELLED}:
        return batch
    if BatchStatus.CANCELLING not in _after(batch.status):
        raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
    if batch.frozen_at is not None:
        # Its window has ended and its files are being made: the status follows with them.
        raise Conflict(f"Cannot cancel a batch with status '{BatchStatus.EXPIRED}'.")
    move(session, batch_id, BatchStatus.CANCELLING, now)
    advance(session, batch_id, now)
    return queue.lock_batch(session, batch_id)


def pause(session: Session, project_id: UUID, batch_id: UUID, now: datetime) -> Batch | None:
    """Let nobody claim shards of the batch; a second time changes nothing. Its window runs on.

    Raises Conflict where it is not to run any more.
    """
    batch = _lock_own(session, project_id, batch_id)
    if batch is None:
        return None
    if batch.frozen_at is not None or batch.status not in RUNNING:
        raise Conflict(f"Cannot pause a batch with status '{batch.status}'.")
    if batch.paused_at is None:
        batch.paused_at = now
        session.flush()
    return batch


def resume(session: Session, project_id: UUID, batch_id: UUID) -> Batch | None:
    """Let shards be claimed again; of a batch that is not paused, or has run since, nothing.

    Raises Conflict where it is not to run any more.
    """
    batch = _lock_own(session, project_id, batch_id)
    if batch is None:
        return None
    # A client that did not hear our answer asks again, and the batch may have completed meanwhile.
    ran = {BatchStatus.FINALIZING, BatchStatus.COMPLETED}
    if batch.frozen_at is not None or batch.status not in RUNNING | ran:
        raise Conflict(f"Cannot resume a batch with status '{batch.status}'.")
    batch.paused_at = None
    session.flush()
    return batch


def retry(session: Session, project_id: UUID, batch_id: UUID, now: datetime) -> Batch | None:
    """A new batch of the lines that this one left without a success; asked again, the same one,
    unless that is deleted or never ran.

    Raises Conflict where there is nothing to run, or nothing to run it from.
    """
    source = _lock_own(session, project_id, batch_id)
    if source is None:
        return None
    if source.status not in TERMINAL:
        raise Conflict(f"Cannot retry a batch with status '{source.status}'.")
    if source.retried_by is not None:
        already = get(session, project_id, source.retried_by)
        if already is not None and not _never_ran(already):
            return already
    if source.completed == source.total:
        raise Conflict("Nothing is left to retry: no line failed, expired or was cancelled.")
    # Deleted, it has no reader left, so its bytes go any moment.
    if files.hold(session, project_id, source.input_file_id, now) is None:
        raise Conflict("The input file of this batch is gone: upload it again for a new batch.")
    made = create(
        session,
        project_id=project_id,
        endpoint=source.endpoint,
        input_file_id=source.input_file_id,
        completion_window=source.completion_window,
        window=wire.window(source.completion_window),
        metadata=source.metadata_,
        output_expires_after_s=source.output_expires_after_s,
        now=now,
        retry_of=source.id,
    )
    source.retried_by = made.id
    session.flush()
    return made


def _never_ran(batch: Batch) -> bool:
    return batch.status in TERMINAL and batch.in_progress_at is None


def delete(session: Session, project_id: UUID, batch_id: UUID, now: datetime) -> bool:
    """Take an ended batch and its files from the API; a stage removes what it holds. Answers
    whether there is, or was, such a batch.

    Raises Conflict while it runs, or while a retry of it has not got its lines yet.
    """
    if not was_ever(session, project_id, batch_id):
        return False
    batch = queue.lock_batch(session, batch_id)
    if batch.deleted_at is not None:
        return True
    if batch.status not in TERMINAL:
        raise Conflict(f"Cannot delete a batch with status '{batch.status}'. Cancel it first.")
    taken_over = None if batch.retried_by is None else session.get(Batch, batch.retried_by)
    if taken_over is not None and taken_over.status is BatchStatus.VALIDATING:
        raise Conflict("Cannot delete a batch whose retry is still being validated.")
    batch.deleted_at = now
    session.flush()
    results = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
    session.execute(
        update(File).where(File.id.in_(results), File.deleted_at.is_(None)).values(deleted_at=now)
    )
    queue.add_stage(session, batch_id, StageName.REMOVE, now)
    return True


def forget(session: Session, batch_id: UUID) -> None:
    """Of a deleted batch, whose lines are gone, keep what the ledger and its links name."""
    session.execute(sql_delete(Part).where(Part.batch_id == batch_id))
    session.execute(sql_delete(Shard).where(Shard.batch_id == batch_id))
    session.execute(
        update(Batch).where(Batch.id == batch_id).values(metadata_=null(), errors=null())
    )


def _after(status: BatchStatus) -> frozenset[BatchStatus]:
    return frozenset(to for to in BatchStatus if status in before(to))


def advance(session: Session, batch_id: UUID, now: datetime) -> bool:
    """Close the batch if nothing of it is left to do. Answers whether an assemble stage was added.

    Called by whoever ends a stage or shard, in the same transaction, and by the tick.
    """
    batch = queue.lock_batch(session, batch_id)
    if batch.frozen_at is not None:
        return False
    if batch.status is BatchStatus.IN_PROGRESS:
        if queue.is_open(session, batch_id, states=[ShardState.READY, ShardState.LEASED]):
            return False
        move(session, batch_id, BatchStatus.FINALIZING, now)
        queue.add_stage(session, batch_id, StageName.ASSEMBLE, now)
        return True
    if batch.status is BatchStatus.CANCELLING:
        queue.kill(session, batch_id, leased_too=False)
        # Lines in flight may finish: their workers flush and hand back, or their leases run out.
        if queue.is_open(session, batch_id, states=[ShardState.LEASED]):
            return False
        _freeze(session, batch_id, LineState.CANCELLED, now)
        return True
    return False


def hand_back(session: Session, lease: queue.Lease, now: datetime) -> bool:
    """Return a claim unfinished, at a shutdown or cancel. Answers whether the batch closed by it.

    Raises LeaseLost.
    """
    queue.lock_batch(session, lease.batch_id)
    queue.hand_back(session, lease, not_before=now)
    return advance(session, lease.batch_id, now)


def _freeze(session: Session, batch_id: UUID, state: LineState, now: datetime) -> None:
    """Unfinished lines → `state`; from here on no write-back counts, and files can be made."""
    # The long one first: while a million lines are written, no row that a worker renews is locked.
    # Nobody writes lines meanwhile, since whoever does locks the batch first.
    lines.freeze(session, batch_id, state)
    queue.kill(session, batch_id, leased_too=True)
    session.execute(update(Batch).where(Batch.id == batch_id).values(frozen_at=now))
    queue.add_stage(session, batch_id, StageName.ASSEMBLE, now)


def due_to_expire(session: Session, now: datetime, *, limit: int = 100) -> list[UUID]:
    """Batches whose window has ended while they were still validating or running."""
    return list(
        session.scalars(
            select(Batch.id)
            .where(
                Batch.status.in_(RUNNING),
                Batch.expires_at <= now,
                Batch.frozen_at.is_(None),
            )
            .order_by(Batch.expires_at)
            .limit(limit)
        )
    )


def expire(session: Session, batch_id: UUID, now: datetime) -> bool:
    """Freeze the batch if its window has ended; the status follows with the files."""
    batch = queue.lock_batch(session, batch_id)
    if batch.status not in RUNNING or batch.frozen_at is not None or batch.expires_at > now:
        return False
    _freeze(session, batch_id, LineState.EXPIRED, now)
    return True


def stalled(session: Session) -> list[UUID]:
    """Running batches that have nothing left to claim, and cancelling ones that nobody holds.

    `advance` normally closes them; a worker that died at the wrong moment leaves it to the tick.
    """

    def nothing(states: list[ShardState]) -> ColumnElement[bool]:
        return and_(
            ~exists().where(Stage.batch_id == Batch.id, Stage.state.in_(states)),
            ~exists().where(Shard.batch_id == Batch.id, Shard.state.in_(states)),
        )

    running = and_(
        Batch.status == BatchStatus.IN_PROGRESS, nothing([ShardState.READY, ShardState.LEASED])
    )
    cancelling = and_(Batch.status == BatchStatus.CANCELLING, nothing([ShardState.LEASED]))
    return list(
        session.scalars(select(Batch.id).where(Batch.frozen_at.is_(None), or_(running, cancelling)))
    )


def final_status(batch: Batch) -> BatchStatus:
    """Where a batch whose files are assembled ends."""
    if batch.status is BatchStatus.FINALIZING:
        return BatchStatus.COMPLETED
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    return BatchStatus.EXPIRED


def end(
    session: Session,
    batch_id: UUID,
    *,
    output: File | None,
    errors: File | None,
    spread: lines.Spread,
    now: datetime,
) -> BatchStatus:
    """The terminal status together with the files: no reader sees one without the other."""
    batch = queue.lock_batch(session, batch_id)
    status = final_status(batch)
    session.add_all(file for file in (output, errors) if file is not None)
    session.flush()
    move(session, batch_id, status, now)
    session.execute(
        update(Batch)
        .where(Batch.id == batch_id)
        .values(
            output_file_id=None if output is None else output.id,
            error_file_id=None if errors is None else errors.id,
            p50_ms=spread.p50_ms,
            p95_ms=spread.p95_ms,
        )
    )
    queue.add_stage(session, batch_id, StageName.CLEAN, now)
    return status


def fail(
    session: Session,
    batch_id: UUID,
    *,
    errors: list[dict[str, object]],
    error_count: int,
    now: datetime,
) -> None:
    """The whole file is refused: validating → failed, with what was wrong."""
    move(session, batch_id, BatchStatus.FAILED, now)
    session.execute(
        update(Batch).where(Batch.id == batch_id).values(errors=errors, error_count=error_count)
    )


def reads_file(session: Session, file_id: UUID) -> bool:
    """Whether an unfinished batch still needs the bytes of that file."""
    return (
        session.scalar(
            select(Batch.id)
            .where(Batch.input_file_id == file_id, Batch.status.not_in(TERMINAL))
            .limit(1)
        )
        is not None
    )
