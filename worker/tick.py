"""What does the beat set right every few seconds? Whatever a lost message or a dead worker left.

Each duty is a transaction of its own, and doing one twice, or in two workers at once, is harmless.
No duty waits for another: one that fails is logged and done again at the next tick. Nothing here
touches the object store, which may hang; that is the sweep's (`worker.leftovers`).
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import structlog

from service.batch import StageName
from service.db import batches, checks, hung, queue, session, webhooks, workers
from service.db.session import Database
from service.doctor import SILENT_LEASES
from worker.resources import Resources

log = structlog.get_logger()


def tick(resources: Resources) -> None:
    """Reap leases, enforce windows, close what is done, wake who has work."""
    database = resources.database
    duties: tuple[Callable[[], None], ...] = (
        # First: the rows of a claim that is to be reaped may be locked by the one who hangs.
        lambda: end_hung(database, resources.settings.lease),
        lambda: reap(database),
        lambda: close_due(database),
        lambda: close_stalled(database),
        lambda: sweep_deliveries(database),
        lambda: wake(resources),
    )
    for duty in duties:
        _do(duty)


def _do(duty: Callable[[], None]) -> None:
    try:
        duty()
    # Every duty must outlive the others: one poison batch must not stop everybody's clock.
    except Exception:
        log.exception("duty of the tick failed")


def end_hung(database: Database, lease: timedelta) -> None:
    """Give free what workers hold that stopped in the middle of a transaction."""
    with database.transaction() as transaction:
        number = hung.end(transaction, lease)
    if number:
        log.warning("transactions of stalled workers ended", number=number)


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
        _do(partial(_expire, database, batch_id))


def _expire(database: Database, batch_id: UUID) -> None:
    with database.transaction() as transaction:
        session.wait_briefly(transaction)
        if batches.expire(transaction, batch_id, session.now(transaction)):
            log.info("batch window ended", batch=batch_id.hex)


def close_stalled(database: Database) -> None:
    """Batches with nothing left to claim that nobody closed, or that nobody is to assemble."""
    with database.transaction() as transaction:
        stalled = batches.stalled(transaction)
        decided = checks.unassembled(transaction)
    for batch_id in stalled:
        _do(partial(_advance, database, batch_id))
    for batch_id in decided:
        log.error("batch was left without its assemble stage", batch=batch_id.hex)
        _do(partial(_assemble_anew, database, batch_id))


def _advance(database: Database, batch_id: UUID) -> None:
    with database.transaction() as transaction:
        session.wait_briefly(transaction)
        batches.advance(transaction, batch_id, session.now(transaction))


def _assemble_anew(database: Database, batch_id: UUID) -> None:
    with database.transaction() as transaction:
        session.wait_briefly(transaction)
        checks.assemble_anew(transaction, batch_id, session.now(transaction))


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
        StageName.REMOVE: resources.waker.remove,
    }
    for stage in stages:
        wakes[stage]()
    for model in models:
        resources.waker.drain(model)
    if letters:
        resources.waker.deliver()
