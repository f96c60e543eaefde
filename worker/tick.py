"""What does the beat set right every few seconds? Whatever a lost message or a dead worker left.

Each duty is a transaction of its own, and doing one twice, or in two workers at once, is harmless.
"""

from datetime import datetime, timedelta

import structlog

from service.batch import StageName
from service.db import batches, queue, session, sweep, webhooks, workers
from service.db.session import Database
from service.storage import StorageError
from worker import leftovers
from worker.resources import Resources

log = structlog.get_logger()

SILENT_LEASES = 3
"""A worker not heard of for so many leases is forgotten."""


def tick(resources: Resources) -> None:
    """Reap leases, enforce windows, close what is done, remove bytes, wake who has work."""
    database = resources.database
    reap(database)
    close_due(database)
    close_stalled(database)
    sweep_files(resources)
    leftovers.sweep_uploads(resources)
    leftovers.sweep_idempotency_keys(resources)
    sweep_deliveries(database)
    wake(resources)


def reap(database: Database) -> None:
    """Take back the claims of workers that stopped renewing."""
    with database.transaction() as transaction:
        lost = queue.reap(transaction, session.now(transaction))
    for lease in lost:
        log.warning(
            "lease reaped",
            table=lease.table.__tablename__,
            id=lease.id.hex,
            batch=lease.batch_id.hex,
            attempt=lease.attempt,
        )


def close_due(database: Database) -> None:
    """Batches whose window has ended: freeze them, engine workers or none."""
    with database.transaction() as transaction:
        due = batches.due_to_expire(transaction, session.now(transaction))
    for batch_id in due:
        with database.transaction() as transaction:
            if batches.expire(transaction, batch_id, session.now(transaction)):
                log.info("batch window ended", batch=batch_id.hex)


def close_stalled(database: Database) -> None:
    """Batches with nothing left to claim that nobody closed."""
    with database.transaction() as transaction:
        stalled = batches.stalled(transaction)
    for batch_id in stalled:
        with database.transaction() as transaction:
            batches.advance(transaction, batch_id, session.now(transaction))


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


def sweep_deliveries(database: Database) -> None:
    """Give up webhook deliveries by the clock; forget those that ended some days ago."""
    with database.transaction() as transaction:
        now = session.now(transaction)
        webhooks.forget_old(transaction, now)
        given_up = webhooks.give_up_old(transaction, now)
    if given_up:
        log.warning("deliveries given up", number=given_up)


def wake(resources: Resources) -> None:
    """Tell workers of what is claimable: this replaces every message that was lost."""
    with resources.database.transaction() as transaction:
        now: datetime = session.now(transaction)
        silence = timedelta(seconds=resources.settings.lease_s * SILENT_LEASES)
        workers.forget(transaction, now, silence)
        stages = queue.ready_stages(transaction, now)
        models = queue.runnable_models(transaction, now)
        letters = queue.deliveries_due(transaction, now)
    wakes = {
        StageName.VALIDATE: resources.waker.validate,
        StageName.PLAN: resources.waker.plan,
        StageName.ASSEMBLE: resources.waker.assemble,
        StageName.CLEAN: resources.waker.clean,
    }
    for stage in stages:
        wakes[stage]()
    for model in models:
        resources.waker.drain(model)
    if letters:
        resources.waker.deliver()
