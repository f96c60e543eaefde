"""What is wrong with a service as a whole, and what would mend it?

Every check asks for something that the running service keeps true by itself; whatever is found
here has slipped through. A check reads; a finding knows how it is mended, and that looks again
first, so that it may be done beside running workers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from uuid import UUID

from sqlalchemy.orm import Session

from service.db import batches, checks, queue, session
from service.db.session import Database
from service.ids import Prefix, show
from service.places import PARTS, RESULTS, Place, read_key
from service.storage import Storage

ABANDONED_AFTER = timedelta(days=1)
"""Nothing that this service writes takes so long: whoever was at it has died."""

SILENT_LEASES = 3
"""A worker not heard of for so many leases is gone."""

KEYS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    check: str
    what: str
    # What mending does, and how; None where a person has to.
    remedy: str
    mend: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class Patient:
    """The parts of a service that are looked into."""

    database: Database
    storage: Storage
    lease: timedelta


Check = Callable[[Patient], Iterator[Finding]]


def examine(patient: Patient) -> Iterator[Finding]:
    """All that is wrong, a check at a time."""
    for check in CHECKS:
        yield from check(patient)


def _in_transaction(patient: Patient, work: Callable[[Session, datetime], object]) -> None:
    with patient.database.transaction() as transaction:
        work(transaction, session.now(transaction))


def _counts(patient: Patient) -> Iterator[Finding]:
    with patient.database.transaction() as transaction:
        found = checks.wrong_counts(transaction)
    for wrong in found:
        mend = partial(_recount, patient, wrong.batch)
        lost = wrong.lines_missing != 0
        yield Finding(
            "counts",
            f"{_shown(wrong.batch)}: {'; '.join(wrong.differs)}",
            "restore a backup: lines are missing" if lost else "count the lines again",
            None if lost else mend,
        )


def _recount(patient: Patient, batch_id: UUID) -> None:
    _in_transaction(patient, lambda transaction, _: checks.recount(transaction, batch_id))


def _leases(patient: Patient) -> Iterator[Finding]:
    with patient.database.transaction() as transaction:
        now = session.now(transaction)
        past = checks.leases_past(transaction, now)
        silent = checks.held_by_nobody(transaction, now - patient.lease * SILENT_LEASES)
    if past:
        what = f"{past} claims whose lease has run out; does the beat run?"
        yield Finding("leases", what, "take them back", partial(_reap, patient))
    for name, number in silent:
        what = f"{number} shards held by {name}, which was not heard of"
        yield Finding("leases", what, "none is needed: its leases run out", None)


def _reap(patient: Patient) -> None:
    _in_transaction(patient, queue.reap)


def _workers(patient: Patient) -> Iterator[Finding]:
    with patient.database.transaction() as transaction:
        now = session.now(transaction)
        models = checks.unserved(transaction, now, now - patient.lease * SILENT_LEASES)
    for model in models:
        what = f"{model} has lines to run and no worker"
        yield Finding("workers", what, f"halfrate run engine --model {model}", None)


def _stalled(patient: Patient) -> Iterator[Finding]:
    with patient.database.transaction() as transaction:
        now = session.now(transaction)
        overdue = batches.due_to_expire(transaction, now)
        stalled = batches.stalled(transaction)
        decided = checks.unassembled(transaction)
        lost = checks.lines_without_shard(transaction)
        failing = checks.failing_stages(transaction)
    for batch_id, number in lost:
        what = f"{_shown(batch_id)}: {number} lines stand in no shard that will run"
        yield Finding(
            "batches", what, "make shards of them", _on(patient, checks.shard_anew, batch_id)
        )
    for batch_id in overdue:
        what = f"{_shown(batch_id)}: its window has ended; does the beat run?"
        yield Finding("batches", what, "end it", _on(patient, batches.expire, batch_id))
    # One whose lines were lost is stalled too; closed, it could not be assembled.
    for batch_id in set(stalled) - {batch_id for batch_id, _ in lost}:
        what = f"{_shown(batch_id)}: nothing is left to run, and it is not closed"
        yield Finding("batches", what, "close it", _on(patient, batches.advance, batch_id))
    for batch_id in decided:
        what = f"{_shown(batch_id)}: all is decided, and nobody is to assemble it"
        yield Finding(
            "batches", what, "have it assembled", _on(patient, checks.assemble_anew, batch_id)
        )
    for batch_id, name, failures in failing:
        what = f"{_shown(batch_id)}: {name} failed {failures} times"
        yield Finding("stages", what, "see the log of the CPU workers; it is tried again", None)


def _on(
    patient: Patient, work: Callable[[Session, UUID, datetime], object], batch_id: UUID
) -> Callable[[], None]:
    return partial(
        _in_transaction, patient, lambda transaction, now: work(transaction, batch_id, now)
    )


def _parts(patient: Patient) -> Iterator[Finding]:
    for keys in _unwanted(patient, PARTS, checks.unwanted_parts):
        what = f"{len(keys)} objects under {PARTS} that no row names, such as {keys[0]}"
        yield Finding("parts", what, "remove them", partial(patient.storage.delete, keys))


def _results(patient: Patient) -> Iterator[Finding]:
    for keys in _unwanted(patient, RESULTS, checks.unwanted_results):
        what = f"{len(keys)} objects under {RESULTS} that no file is, such as {keys[0]}"
        yield Finding("results", what, "remove them", partial(patient.storage.delete, keys))


def _unwanted(
    patient: Patient, prefix: str, ask: Callable[[Session, list[Place]], list[str]]
) -> Iterator[list[str]]:
    """Keys that may go, a list for each page of the store."""
    # Listed first, asked for then: what is put meanwhile is not seen at all.
    for page in _pages(place for key in patient.storage.list(prefix) if (place := read_key(key))):
        with patient.database.transaction() as transaction:
            keys = ask(transaction, page)
        if keys:
            yield keys


def _pages(found: Iterable[Place]) -> Iterator[list[Place]]:
    remaining = iter(found)
    while page := list(islice(remaining, KEYS_AT_ONCE)):
        yield page


def _uploads(patient: Patient) -> Iterator[Finding]:
    with patient.database.transaction() as transaction:
        before = session.now(transaction) - ABANDONED_AFTER
    number = sum(1 for _ in patient.storage.unfinished(before))
    if number:
        what = f"{number} multipart uploads that nobody will finish"
        yield Finding("uploads", what, "give them up", partial(_abort, patient.storage, before))


def _abort(storage: Storage, before: datetime) -> None:
    storage.abort_unfinished(before)


def _shown(batch_id: UUID) -> str:
    return show(Prefix.BATCH, batch_id)


CHECKS: tuple[Check, ...] = (_counts, _leases, _workers, _stalled, _parts, _results, _uploads)
