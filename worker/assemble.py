"""How do the parts of a batch become its output and its error file, in input order?

Parts are sorted by line, so this is an external merge: at most FAN_IN parts at a time, each read in
blocks by Range (no connection stands open), into runs on local disk where there are more. Lines
that never ran come from Postgres by a cursor, in the same order. Memory is flat in file size.
"""

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from typing import BinaryIO
from uuid import UUID

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.batch import LineState
from service.db import batches, lines, queue, session
from service.db.models import Batch, File, Part
from service.ids import Prefix, new_id, show
from service.places import result_key
from service.settings import MIB
from service.storage import ObjectWriter, Storage
from service.wire import BATCH_OUTPUT
from worker import answers
from worker.lease import KeptLease
from worker.resources import Resources
from worker.write_back import FAILED, SUCCEEDED, Record, decode, encode

log = structlog.get_logger()

FAN_IN = 64
BLOCK = 256 * 1024
MERGE_BYTES = 256 * MIB
"""What a merge may hold in memory; lines of many vectors are megabytes each."""
CHECK_LINES = 1_000

NAMES = {SUCCEEDED: "output", FAILED: "error"}


class Incomplete(Exception):
    """Output and error file would not hold every line exactly once: nothing is published."""


@dataclass(frozen=True, slots=True)
class _Result:
    """One of the two files while it is written."""

    id: UUID
    storage_key: str
    writer: ObjectWriter


def assemble(resources: Resources, kept: KeptLease) -> None:
    """Write both files, then publish them with the terminal status in one fenced transaction."""
    lease = kept.lease
    with resources.database.transaction() as transaction:
        batch = transaction.execute(select(Batch).where(Batch.id == lease.batch_id)).scalar_one()
        keys = _parts(transaction, lease.batch_id)
        longest, spread = lines.measure(transaction, lease.batch_id)
    ran = batch.in_progress_at is not None
    with ExitStack() as stack:
        # On any exception both uploads are aborted: nothing is left behind.
        results = {
            kind: _open(stack, resources.storage, lease, name) for kind, name in NAMES.items()
        }
        if ran:
            merged = merge_parts(resources.storage, keys, fan_in=fan_in(longest), check=kept.check)
            counts = _write(resources, kept, merged, results, stack)
            if (sum(counts.values()), counts[SUCCEEDED]) != (batch.total, batch.completed):
                raise Incomplete(f"{counts} of {batch.total} lines")
        else:
            counts = {SUCCEEDED: 0, FAILED: 0}
    _publish(resources, lease, batch, results, counts, spread, drop_lines=not ran)


def _parts(transaction: Session, batch_id: UUID) -> list[str]:
    return list(
        transaction.scalars(
            select(Part.storage_key).where(Part.batch_id == batch_id).order_by(Part.id)
        )
    )


def _open(stack: ExitStack, storage: Storage, lease: queue.Lease, name: str) -> _Result:
    key = result_key(lease.batch_id, name, lease.attempt)
    return _Result(new_id(), key, stack.enter_context(storage.writer(key)))


def _write(
    resources: Resources,
    kept: KeptLease,
    merged: Iterator[Record],
    results: dict[bytes, _Result],
    stack: ExitStack,
) -> dict[bytes, int]:
    transaction = stack.enter_context(resources.database.transaction())
    sources = [merged, _never_ran(transaction, kept.lease.batch_id)]
    counts = {SUCCEEDED: 0, FAILED: 0}
    previous = 0
    for record in heapq.merge(*sources, key=lambda each: each.line):
        if record.line <= previous:
            raise Incomplete(f"line {record.line} stands twice")
        previous = record.line
        results[record.kind].writer.write(record.data + b"\n")
        counts[record.kind] += 1
        if sum(counts.values()) % CHECK_LINES == 0:
            kept.check()
    return counts


def _never_ran(transaction: Session, batch_id: UUID) -> Iterator[Record]:
    for line, custom_id, state in lines.unanswered(transaction, batch_id):
        yield Record(line, FAILED, answers.never_ran_line(custom_id, LineState(state)))


def fan_in(longest: int) -> int:
    """How many parts may be merged at once: each holds a block and a line, up to three times."""
    return max(2, min(FAN_IN, MERGE_BYTES // (3 * (BLOCK + longest))))


def merge_parts(
    storage: Storage, keys: Sequence[str], *, fan_in: int, check: Callable[[], None]
) -> Iterator[Record]:
    """The records of all these parts by line. A merge of many parts goes by runs on local disk,
    which have no name there: they are gone with the process, however it ends.

    `check` is called now and then and may raise.
    """
    if len(keys) <= fan_in:
        yield from _merge([_read_part(storage, key) for key in keys])
        return
    with ExitStack() as stack:
        # Level by level, as full ones come up: never more files open than fan_in a level.
        levels: list[list[BinaryIO]] = []
        remaining = iter(keys)
        while group := list(islice(remaining, fan_in)):
            run = _spool(stack, _merge([_read_part(storage, key) for key in group]), check)
            _add_run(stack, levels, run, fan_in=fan_in, check=check)
        while sum(map(len, levels)) > fan_in:
            _raise_lowest(stack, levels, check)
        yield from _merge([_read_run(run) for level in levels for run in level])


def _add_run(
    stack: ExitStack,
    levels: list[list[BinaryIO]],
    run: BinaryIO,
    *,
    fan_in: int,
    check: Callable[[], None],
) -> None:
    """Put a run on the lowest level; a full level becomes one run of the next."""
    for depth in count():
        if depth == len(levels):
            levels.append([])
        levels[depth].append(run)
        if len(levels[depth]) < fan_in:
            return
        run = _merge_runs(stack, levels[depth], check)
        levels[depth] = []


def _raise_lowest(
    stack: ExitStack, levels: list[list[BinaryIO]], check: Callable[[], None]
) -> None:
    """The runs of the lowest level as one of the next, which has the longer ones."""
    lowest = levels.pop(0)
    if lowest:
        levels[0].append(_merge_runs(stack, lowest, check))


def _merge_runs(stack: ExitStack, runs: list[BinaryIO], check: Callable[[], None]) -> BinaryIO:
    merged = _spool(stack, _merge([_read_run(run) for run in runs]), check)
    for run in runs:
        run.close()
    return merged


def _merge(sources: Sequence[Iterator[Record]]) -> Iterator[Record]:
    return heapq.merge(*sources, key=lambda record: record.line)


def _spool(stack: ExitStack, records: Iterable[Record], check: Callable[[], None]) -> BinaryIO:
    run = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    for number, record in enumerate(records):
        if number % CHECK_LINES == 0:
            check()
        run.write(encode(record))
    run.seek(0)
    return run


def _read_run(run: BinaryIO) -> Iterator[Record]:
    for raw in run:
        yield decode(raw[:-1])


def _read_part(storage: Storage, key: str) -> Iterator[Record]:
    position, rest, more = 0, b"", True
    while more:
        block = storage.read(key, position, BLOCK)
        # A short block is the last: most parts are one read, and none is read behind its end.
        more = len(block) == BLOCK
        position += len(block)
        *ends, rest = (rest + block).split(b"\n")
        for raw in ends:
            yield decode(raw)


def _publish(
    resources: Resources,
    lease: queue.Lease,
    batch: Batch,
    results: dict[bytes, _Result],
    counts: dict[bytes, int],
    spread: lines.Spread,
    *,
    drop_lines: bool,
) -> None:
    try:
        with resources.database.transaction() as transaction:
            now = session.now(transaction)
            queue.lock_batch(transaction, batch.id)
            queue.settle(transaction, lease)
            if drop_lines:
                lines.drop(transaction, batch.id)
            days = timedelta(days=resources.settings.file_days)
            lifetime = (
                days
                if batch.output_expires_after_s is None
                else timedelta(seconds=batch.output_expires_after_s)
            )

            def file(kind: bytes) -> File | None:
                result = results[kind]
                if not counts[kind]:
                    return None
                return File(
                    id=result.id,
                    project_id=batch.project_id,
                    purpose=BATCH_OUTPUT,
                    filename=f"{show(Prefix.BATCH, batch.id)}_{NAMES[kind]}.jsonl",
                    bytes=result.writer.size,
                    storage_key=result.storage_key,
                    created_at=now,
                    expires_at=now + lifetime,
                )

            status = batches.end(
                transaction,
                batch.id,
                output=file(SUCCEEDED),
                errors=file(FAILED),
                spread=spread,
                now=now,
            )
    except queue.LeaseLost:
        resources.storage.delete([result.storage_key for result in results.values()])
        raise
    log.info("batch ended", batch=batch.id.hex, status=status)
    resources.waker.clean()
    resources.waker.deliver()
