"""What do files, uploads and keys leave behind, and when may it go?

Doing any of it twice, or in two workers at once, is harmless. It talks to the object store, so it
runs apart from the tick, by one process at a time: a store that hangs must not hold up the clock.
"""

import structlog

from service.db import idempotency, queue, removals, session, sweep, uploads
from service.doctor import ABANDONED_AFTER
from service.storage import StorageError
from worker.resources import Resources

log = structlog.get_logger()


def sweep_all(resources: Resources) -> None:
    """Everything below that is done every few seconds, unless another process is at it."""
    with queue.only_one(resources.database.engine, queue.SWEEP) as alone:
        if not alone:
            return
        sweep_idempotency_keys(resources)
        with removals.allowed(resources.database.engine) as may:
            if may:
                sweep_files(resources)
                sweep_uploads(resources)


def sweep_files(resources: Resources) -> None:
    """Expire files by the clock; remove the bytes of those that are deleted and not needed."""
    with resources.database.transaction() as transaction:
        sweep.expire_files(transaction, session.now(transaction))
        removable = sweep.removable(transaction)
    if not removable:
        return
    try:
        resources.storage.delete([key for _, key in removable])
    except StorageError as error:
        log.warning("files not removed yet", number=len(removable), error=str(error))
        return
    with resources.database.transaction() as transaction:
        sweep.removed(transaction, [file for file, _ in removable], session.now(transaction))


def sweep_uploads(resources: Resources) -> None:
    """Expire uploads by the clock; remove the parts of those that have ended, later their rows."""
    with resources.database.transaction() as transaction:
        now = session.now(transaction)
        uploads.expire(transaction, now)
        uploads.forget(transaction, now)
        removable = uploads.removable(transaction)
    if not removable:
        return
    try:
        resources.storage.delete(key for keys in removable.values() for key in keys)
    except StorageError as error:
        log.warning("upload parts not removed yet", uploads=len(removable), error=str(error))
        return
    with resources.database.transaction() as transaction:
        uploads.removed(transaction, list(removable), session.now(transaction))


def sweep_idempotency_keys(resources: Resources) -> None:
    """Forget the keys that have run out."""
    with resources.database.transaction() as transaction:
        idempotency.forget(transaction, session.now(transaction))


def abort_abandoned(resources: Resources) -> None:
    """Give up the store's multipart uploads that nobody will finish: they take room unseen."""
    with queue.only_one(resources.database.engine, queue.SWEEP) as alone:
        if not alone:
            return
        with resources.database.transaction() as transaction:
            before = session.now(transaction) - ABANDONED_AFTER
        number = resources.storage.abort_unfinished(before)
    if number:
        log.info("abandoned multipart uploads aborted", number=number)
