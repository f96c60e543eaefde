"""Which files does a project have? A file that is deleted or past its time is not there."""

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, or_, select
from sqlalchemy.orm import Session

from service.db.models import File
from service.wire import Purpose


def storage_key(project_id: UUID, file_id: UUID) -> str:
    """Where the file's bytes lie: made of ids alone, never of what a client named it."""
    return f"files/{project_id.hex}/{file_id.hex}"


def new(
    project_id: UUID,
    file_id: UUID,
    *,
    purpose: str,
    filename: str,
    size: int,
    created_at: datetime,
    expires_after_s: int | None,
    batch_days: float,
) -> File:
    """The row of an uploaded file. One for batches expires after `batch_days` unless told
    otherwise, any other only if told."""
    expires_at = None
    if expires_after_s is not None:
        expires_at = created_at + timedelta(seconds=expires_after_s)
    elif purpose == Purpose.BATCH:
        expires_at = created_at + timedelta(days=batch_days)
    return File(
        id=file_id,
        project_id=project_id,
        purpose=purpose,
        filename=filename,
        bytes=size,
        storage_key=storage_key(project_id, file_id),
        created_at=created_at,
        expires_at=expires_at,
    )


def add(session: Session, file: File) -> File:
    """Record a file whose bytes are stored."""
    session.add(file)
    session.flush()
    return file


def find(session: Session, project_id: UUID, file_id: UUID, at: datetime) -> File | None:
    """The project's file of that id, as of `at`."""
    return session.scalar(
        select(File).where(File.project_id == project_id, File.id == file_id, _there(at))
    )


def hold(session: Session, project_id: UUID, file_id: UUID, at: datetime) -> File | None:
    """As `find`, and nobody deletes it before this transaction has ended.

    A batch is made under it: its input is either seen in use by the deleting transaction, or gone.
    """
    return session.scalar(
        select(File)
        .where(File.project_id == project_id, File.id == file_id, _there(at))
        .with_for_update(read=True)
    )


def page(
    session: Session,
    project_id: UUID,
    *,
    purpose: str | None,
    after: UUID | None,
    limit: int,
    newest_first: bool,
    at: datetime,
) -> list[File]:
    """At most `limit` files that come behind `after` in the order asked for."""
    query = select(File).where(File.project_id == project_id, _there(at))
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    if after is not None:
        query = query.where(File.id < after if newest_first else File.id > after)
    order = File.id.desc() if newest_first else File.id.asc()
    return list(session.scalars(query.order_by(order).limit(limit)))


def was_ever(session: Session, project_id: UUID, file_id: UUID) -> bool:
    """Whether the id may stand as a page's `after`: deleted meanwhile is fine, or a client that
    deletes what it lists could not turn the page."""
    return (
        session.scalar(select(File.id).where(File.project_id == project_id, File.id == file_id))
        is not None
    )


def mark_deleted(session: Session, project_id: UUID, file_id: UUID, at: datetime) -> File | None:
    """Take the file from the API. Its bytes are the caller's affair: a batch may still read them.

    Waits for transactions that `hold` the file, so that a query after this sees their batches.
    """
    file = session.scalar(
        select(File)
        .where(File.project_id == project_id, File.id == file_id, _there(at))
        .with_for_update()
    )
    if file is not None:
        file.deleted_at = at
        session.flush()
    return file


def forget(session: Session, file_id: UUID) -> None:
    """Remove the row of a file that never came to be; no row is fine."""
    session.execute(delete(File).where(File.id == file_id))


def _there(at: datetime) -> ColumnElement[bool]:
    return and_(File.deleted_at.is_(None), or_(File.expires_at.is_(None), File.expires_at > at))
