"""Which objects does the state need, as of one moment that a dump can share?"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Executable, or_, select, text
from sqlalchemy.orm import Session

from service.batch import TERMINAL
from service.db import sweep, uploads
from service.db.models import Batch, File, Part
from service.db.upload_models import Upload, UploadPart

ROWS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the database, as long as its transaction is open."""

    name: str  # by which another session of the same database, such as pg_dump's, takes part in it
    at: datetime
    revision: str  # of the tables
    session: Session

    def objects(self) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object that is to be read again: those of files that have not gone,
        of parts that are to be assembled, of uploads that may be completed."""
        for row in self._rows(_files()):
            yield row.storage_key, row.bytes
        for row in self._rows(_parts()):
            yield row.storage_key, row.bytes
        for row in self._rows(_upload_parts()):
            yield uploads.part_key(row.project_id, row.upload_id, row.id), row.bytes

    def _rows(self, query: Executable) -> Iterator[Any]:
        return iter(self.session.execute(query.execution_options(yield_per=ROWS_AT_ONCE)))


@contextmanager
def snapshot(engine: Engine) -> Iterator[Snapshot]:
    """The database as it is now."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        name, at = connection.execute(text("SELECT pg_export_snapshot(), now()")).one()
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        with Session(connection) as session:
            yield Snapshot(name, at, revision, session)


def _files() -> Executable:
    there = or_(File.deleted_at.is_(None), sweep.read_by_a_batch())
    return select(File.storage_key, File.bytes).where(File.removed_at.is_(None), there)


def _parts() -> Executable:
    # Once a batch has ended, its files hold what was in them.
    return (
        select(Part.storage_key, Part.bytes)
        .join(Batch, Batch.id == Part.batch_id)
        .where(Batch.status.not_in(TERMINAL))
    )


def _upload_parts() -> Executable:
    return (
        select(Upload.project_id, UploadPart.upload_id, UploadPart.id, UploadPart.bytes)
        .join(Upload, Upload.id == UploadPart.upload_id)
        .where(Upload.ended_at.is_(None))
    )
