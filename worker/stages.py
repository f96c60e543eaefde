"""How does a CPU worker take the stages that are ready, one after another?"""

from collections.abc import Callable

import structlog

from service.batch import StageName
from service.db import batches, queue, session
from service.db.checks import OFTEN
from service.db.queue import Lease, LeaseLost
from worker.lease import Cancelling, Keeper, KeptLease
from worker.resources import Resources

log = structlog.get_logger()

Work = Callable[[Resources, KeptLease], None]


def run_ready(resources: Resources, name: StageName, work: Work) -> None:
    """Claim and do stages of that name until none is ready."""
    while (lease := _claim(resources, name)) is not None:
        _run(resources, name, work, lease)


def _claim(resources: Resources, name: StageName) -> Lease | None:
    settings = resources.settings
    with resources.database.transaction() as transaction:
        # Two processes are kept free, so that neither ticks (leases, the window) nor webhooks wait
        # for a long stage.
        busy = queue.stages_held(transaction, worker=resources.name)
        if busy >= resources.worker_settings.stage_slots:
            return None
        return queue.claim_stage(
            transaction,
            name,
            worker=resources.name,
            now=session.now(transaction),
            lease=settings.lease,
        )


def _run(resources: Resources, name: StageName, work: Work, lease: Lease) -> None:
    event = log.bind(stage=name, batch=lease.batch_id.hex, attempt=lease.attempt)
    settings = resources.settings
    with (
        Keeper(resources.database, lease=settings.lease, every_s=settings.renew_s) as keeper,
        keeper.keep(lease) as kept,
    ):
        try:
            work(resources, kept)
        except LeaseLost:
            event.info("lease lost, work dropped")
        except Cancelling:
            event.info("batch is being cancelled, work dropped")
            _hand_back(resources, lease)
        # The loop must outlive its stage: the next one may be another tenant's.
        except Exception:  # noqa: BLE001 - logged, and the claim given up
            event.exception("stage failed, to be tried again")
            _give_up(resources, lease)
        else:
            event.info("stage done")


def _hand_back(resources: Resources, lease: Lease) -> None:
    try:
        with resources.database.transaction() as transaction:
            closed = batches.hand_back(transaction, lease, session.now(transaction))
    except LeaseLost:
        log.info("lease lost, nothing to hand back", batch=lease.batch_id.hex)
    else:
        if closed:
            resources.waker.assemble()


def _give_up(resources: Resources, lease: Lease) -> None:
    try:
        with resources.database.transaction() as transaction:
            failures = queue.give_up(transaction, lease, now=session.now(transaction))
    except LeaseLost:
        log.info("lease lost, nothing to give up", batch=lease.batch_id.hex)
        return
    if failures >= OFTEN:
        # The batch cannot end by itself: somebody has to look. `halfrate doctor` shows it too.
        log.error("stage keeps failing", batch=lease.batch_id.hex, failures=failures)
