"""Which files have run out, and whose bytes may go from the store?"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import Exists, exists, select, update
from sqlalchemy.orm import Session

from service.batch import TERMINAL
from service.db.models import Batch, File


def expire_files(session: Session, now: datetime) -> None:
    """Files past their time leave the API."""
    session.execute(
        update(File).where(File.expires_at <= now, File.deleted_at.is_(None)).values(deleted_at=now)
    )


def removable(session: Session, *, limit: int = 500) -> Sequence[tuple[UUID, str]]:
    """Deleted files whose bytes are still there and that no unfinished batch reads: (id, key)."""
    rows = session.execute(
        select(File.id, File.storage_key)
        .where(File.deleted_at.is_not(None), File.removed_at.is_(None), ~read_by_a_batch())
        .limit(limit)
    )
    return [(row.id, row.storage_key) for row in rows]


def read_by_a_batch() -> Exists:
    """Of a file: an unfinished batch has it as its input."""
    return exists().where(Batch.input_file_id == File.id, Batch.status.not_in(TERMINAL))


def removed(session: Session, files: Sequence[UUID], now: datetime) -> None:
    """The bytes of these files are gone."""
    session.execute(update(File).where(File.id.in_(files)).values(removed_at=now))
