"""Which uploads does a project have, what parts do they hold, and which of that may go?

An upload that is past its time can no longer be added to or completed, noticed or not. One whose
completion had begun by then is let finish: the sweep waits `JOIN_GRACE` before it expires it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from service.db.upload_models import Upload, UploadPart
from service.upload import UPLOAD_MOVES, UploadStatus

JOIN_GRACE = timedelta(minutes=30)
"""Longest that the joining of an upload's parts is waited for."""

KEPT = timedelta(days=1)
"""So long after its end, a repeated complete or cancel of an upload still gets its answer."""


def part_key(project_id: UUID, upload_id: UUID, part_id: UUID) -> str:
    """Where a part's bytes lie: made of ids alone."""
    return f"uploads/{project_id.hex}/{upload_id.hex}/{part_id.hex}"


def add(session: Session, upload: Upload) -> Upload:
    """Record a new upload."""
    session.add(upload)
    session.flush()
    return upload


def find(session: Session, project_id: UUID, upload_id: UUID) -> Upload | None:
    """The project's upload of that id."""
    return session.scalar(
        select(Upload).where(Upload.project_id == project_id, Upload.id == upload_id)
    )


def hold(session: Session, project_id: UUID, upload_id: UUID) -> Upload | None:
    """As `find`, and nobody changes it before this transaction has ended."""
    return session.scalar(
        select(Upload)
        .where(Upload.project_id == project_id, Upload.id == upload_id)
        .with_for_update()
    )


def status_at(upload: Upload, at: datetime) -> UploadStatus:
    """What the upload is as of `at`: past its time it has expired, noticed or not."""
    if upload.status is UploadStatus.PENDING and upload.expires_at <= at:
        return UploadStatus.EXPIRED
    return upload.status


def add_part(
    session: Session, upload: Upload, part_id: UUID, size: int, at: datetime
) -> UploadPart:
    """Record a part whose bytes are stored; the caller holds the upload."""
    upload.received_parts += 1
    upload.received_bytes += size
    part = UploadPart(id=part_id, upload_id=upload.id, bytes=size, created_at=at)
    session.add(part)
    session.flush()
    return part


def forget_part(session: Session, part_id: UUID) -> None:
    """Remove the row of a part that never came to be; no row is fine."""
    session.execute(delete(UploadPart).where(UploadPart.id == part_id))


def part_sizes(session: Session, upload_id: UUID) -> dict[UUID, int]:
    """The upload's parts: id → bytes."""
    query = select(UploadPart.id, UploadPart.bytes).where(UploadPart.upload_id == upload_id)
    return {row.id: row.bytes for row in session.execute(query)}


def is_pending(session: Session, upload_id: UUID) -> bool:
    """Whether nobody has ended it yet."""
    status = session.scalar(select(Upload.status).where(Upload.id == upload_id))
    return status is UploadStatus.PENDING


def complete(
    session: Session, upload: Upload, file_id: UUID, part_ids: Sequence[UUID], at: datetime
) -> None:
    """The parts have become a file; the caller holds the upload, and it is pending."""
    upload.file_id = file_id
    upload.part_ids = list(part_ids)
    _move(session, upload, UploadStatus.COMPLETED, at)


def cancel(session: Session, upload: Upload, at: datetime) -> None:
    """The client wants it no more; the caller holds the upload, and it is pending."""
    _move(session, upload, UploadStatus.CANCELLED, at)


def expire(session: Session, now: datetime) -> None:
    """Uploads past their time, and past the time that a completion may take, are ended."""
    session.execute(
        update(Upload)
        .where(Upload.status == UploadStatus.PENDING, Upload.expires_at <= now - JOIN_GRACE)
        .values(status=UploadStatus.EXPIRED, ended_at=now)
    )


def removable(session: Session, *, limit: int = 20) -> dict[UUID, list[str]]:
    """Ended uploads whose parts' bytes are still there: id → keys."""
    query = (
        select(Upload.id, Upload.project_id)
        .where(Upload.ended_at.is_not(None), Upload.removed_at.is_(None))
        .order_by(Upload.id)
        .limit(limit)
    )
    projects = {row.id: row.project_id for row in session.execute(query)}
    keys: dict[UUID, list[str]] = {upload_id: [] for upload_id in projects}
    parts = select(UploadPart.id, UploadPart.upload_id).where(UploadPart.upload_id.in_(projects))
    for row in session.execute(parts):
        keys[row.upload_id].append(part_key(projects[row.upload_id], row.upload_id, row.id))
    return keys


def removed(session: Session, upload_ids: Sequence[UUID], now: datetime) -> None:
    """The bytes of these uploads' parts are gone."""
    session.execute(delete(UploadPart).where(UploadPart.upload_id.in_(upload_ids)))
    session.execute(update(Upload).where(Upload.id.in_(upload_ids)).values(removed_at=now))


def forget(session: Session, now: datetime) -> None:
    """Remove the rows of uploads that ended long enough ago."""
    session.execute(delete(Upload).where(Upload.removed_at <= now - KEPT))


def _move(session: Session, upload: Upload, to: UploadStatus, at: datetime) -> None:
    if to not in UPLOAD_MOVES[upload.status]:
        raise IllegalUploadMove(upload.status, to)
    upload.status = to
    upload.ended_at = at
    session.flush()


class IllegalUploadMove(Exception):
    """The upload is not in a state from which it may move there."""

    def __init__(self, from_: UploadStatus, to: UploadStatus) -> None:
        super().__init__(f"no legal move from {from_} to {to}")
