"""Can every line of a batch's input file be run? All bad lines are reported together.

One pass over the bytes, flat in memory: good lines go to Postgres by COPY as they are read, and
Postgres finds the custom_ids that stand twice.
"""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service import lines as checks
from service.batch import BatchStatus, StageName
from service.db import batches, lines, queue, session
from service.db.models import Batch, File
from service.jsonl import RawLine, split
from service.lines import LineError, ValidLine
from service.storage import MissingObject
from worker.lease import Cancelling, KeptLease
from worker.resources import Resources

BYTES_GONE = LineError("input_file_missing", "The bytes of the input file are gone.")


def validate(resources: Resources, kept: KeptLease) -> None:
    """Accept the file (lines stored, plan stage added) or fail the batch with what is wrong.

    Raises Cancelling, LeaseLost.
    """
    batch_id = kept.lease.batch_id
    with resources.database.transaction() as transaction:
        batch, file = _with_input(transaction, batch_id)
    if batch.retry_of is not None:
        _validate_again(resources, kept.lease, batch.retry_of, file)
        return
    reader = _Reader(resources, batch.endpoint, kept)
    try:
        with resources.database.transaction() as transaction:
            count = lines.copy_in(
                transaction, batch_id, reader.rows(resources.storage.stream(file.storage_key))
            )
            _check_whole(resources, transaction, batch_id, reader)
            _accept(transaction, kept.lease, count, reader.model)
    except MissingObject:
        _refuse(resources, kept.lease, [BYTES_GONE], 1)
    except _Refused as refusal:
        _refuse(resources, kept.lease, refusal.errors, refusal.number)
    else:
        resources.waker.plan()


def _validate_again(resources: Resources, lease: queue.Lease, source_id: UUID, file: File) -> None:
    """A retry reads nothing: its lines were found good when the batch before it was validated."""
    try:
        resources.storage.size(file.storage_key)
    except MissingObject:
        _refuse(resources, lease, [BYTES_GONE], 1)
        return
    with resources.database.transaction() as transaction:
        source = transaction.get_one(Batch, source_id)
        count = lines.take_over(transaction, lease.batch_id, source_id=source_id)
        _accept(transaction, lease, count, source.model)
    resources.waker.plan()


def _with_input(transaction: Session, batch_id: UUID) -> tuple[Batch, File]:
    row = transaction.execute(
        select(Batch, File).join(File, File.id == Batch.input_file_id).where(Batch.id == batch_id)
    ).one()
    return row[0], row[1]


class _Refused(Exception):
    """The file as a whole is refused; leaving the transaction by this undoes the COPY."""

    def __init__(self, errors: list[LineError], number: int) -> None:
        super().__init__(f"{number} bad lines")
        self.errors = errors
        self.number = number


class _Reader:
    """Checks line by line; counts requests and errors, keeps the first errors and the models."""

    def __init__(self, resources: Resources, endpoint: str, kept: KeptLease) -> None:
        self._endpoint = endpoint
        self._kept = kept
        self._served = resources.catalog.serving(endpoint)
        self._max_errors = resources.settings.max_errors
        self._max_bytes = resources.settings.max_line_bytes
        self._max_lines = resources.settings.max_lines
        self.requests = 0
        self.errors: list[LineError] = []
        self.error_count = 0
        self._models: set[str] = set()

    @property
    def model(self) -> str | None:
        """The one model of all lines; None where they name several."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def rows(self, chunks: Iterator[bytes]) -> Iterator[lines.NewLine]:
        """Every line that has a custom_id: a bad one's may stand on another line too, and with a
        bad line nothing of this is committed. Of a file that is too long, only so many."""
        for found in split(chunks, limit=self._max_bytes):
            if found.number % 1_000 == 0:
                self._kept.check_cancelling()
            self.requests += 1
            custom_id = self._take(found)
            if custom_id is not None and self.requests <= self._max_lines:
                yield lines.NewLine(
                    line=found.number,
                    custom_id=custom_id,
                    byte_offset=found.offset,
                    byte_length=found.length,
                )

    def _take(self, found: RawLine) -> str | None:
        checked = self._check(found)
        if isinstance(checked, ValidLine):
            self._models.add(checked.model)
            return checked.custom_id
        self._note(checked)
        return None if found.raw is None else checks.custom_id_of(found.raw)

    def _check(self, found: RawLine) -> ValidLine | LineError:
        if found.raw is None:
            return checks.too_large(found.number, found.length, self._max_bytes)
        return checks.check_line(
            found.raw,
            line=found.number,
            endpoint=self._endpoint,
            serves=self._served.__contains__,
        )

    def _note(self, error: LineError) -> None:
        self.error_count += 1
        if len(self.errors) < self._max_errors:
            self.errors.append(error)


def _check_whole(
    resources: Resources, transaction: Session, batch_id: UUID, reader: _Reader
) -> None:
    """What no single line shows. Raises _Refused if there is anything wrong with the file."""
    limit = resources.settings.max_errors
    number, repeated = lines.duplicates(transaction, batch_id, limit=limit)
    errors = reader.errors + [checks.duplicate(row.custom_id, row.line) for row in repeated]
    errors.sort(key=lambda error: error.line or 0)
    number += reader.error_count
    if reader.requests == 0:
        raise _Refused([checks.EMPTY_FILE], 1)
    if reader.requests > resources.settings.max_lines:
        whole = checks.too_many_lines(reader.requests, resources.settings.max_lines)
        raise _Refused([whole, *errors][:limit], number + 1)
    if number:
        raise _Refused(errors[:limit], number)


def _accept(transaction: Session, lease: queue.Lease, count: int, model: str | None) -> None:
    now = session.now(transaction)
    _still_wanted(transaction, lease)
    queue.settle(transaction, lease)
    transaction.execute(
        update(Batch).where(Batch.id == lease.batch_id).values(total=count, model=model)
    )
    batches.move(transaction, lease.batch_id, BatchStatus.IN_PROGRESS, now)
    queue.add_stage(transaction, lease.batch_id, StageName.PLAN, now)


def _still_wanted(transaction: Session, lease: queue.Lease) -> None:
    """Lock the batch. Raises Cancelling where it is to end, and that undoes the COPY."""
    if queue.lock_batch(transaction, lease.batch_id).status is BatchStatus.CANCELLING:
        raise Cancelling


def _refuse(resources: Resources, lease: queue.Lease, errors: list[LineError], number: int) -> None:
    with resources.database.transaction() as transaction:
        now: datetime = session.now(transaction)
        _still_wanted(transaction, lease)
        queue.settle(transaction, lease)
        batches.fail(
            transaction,
            lease.batch_id,
            errors=[asdict(error) for error in errors],
            error_count=number,
            now=now,
        )
    resources.waker.deliver()
