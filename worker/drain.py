"""How does an engine worker take shards? It claims until none is runnable, a few at a time."""

import threading
from collections.abc import Callable

import structlog

from service.clock import Clock
from service.db import queue, session
from service.db.queue import ClaimedShard, LeaseLost
from worker.engine_loop import EngineBroken
from worker.execute import ModelOnLoop, ShardRun
from worker.lease import Keeper, KeptLease
from worker.resources import Resources

log = structlog.get_logger()


class Drain:
    """Claims and runs shards of one model. Several threads may call it; `slots` of them work."""

    def __init__(
        self,
        resources: Resources,
        on: ModelOnLoop,
        keeper: Keeper,
        *,
        stopping: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._resources = resources
        self._on = on
        self._keeper = keeper
        self._stopping = stopping
        self._clock = clock
        # While one shard's last lines run, the next shard's are already in the engine.
        self._slots = threading.BoundedSemaphore(resources.worker_settings.slots)

    def run(self) -> None:
        """Run shards until none is runnable; return at once where all slots work already."""
        if not self._slots.acquire(blocking=False):
            return
        try:
            first = True
            while not self._stopping() and (shard := self._claim()) is not None:
                if first:
                    # There may be more than this: let another slot look.
                    self._resources.waker.drain(self._on.model.id)
                    first = False
                self._run(shard)
        finally:
            self._slots.release()

    def _claim(self) -> ClaimedShard | None:
        with self._resources.database.transaction() as transaction:
            return queue.claim_shard(
                transaction,
                self._on.model.id,
                worker=self._resources.name,
                now=session.now(transaction),
                lease=self._resources.settings.lease,
            )

    def _run(self, shard: ClaimedShard) -> None:
        lease = shard.lease
        event = log.bind(batch=lease.batch_id.hex, shard=lease.id.hex, attempt=lease.attempt)
        with self._keeper.keep(lease) as kept:
            try:
                closed = self._attempt(shard, kept)
            except LeaseLost:
                event.info("lease lost, work dropped")
            # The loop must outlive its shard: the next one may be another tenant's.
            except Exception as error:  # noqa: BLE001 - logged, and the claim given up
                if isinstance(error, EngineBroken):
                    event.warning("engine broke, shard to be tried again")
                else:
                    event.exception("shard failed, to be tried again")
                self._give_up(lease)
            else:
                event.info("shard done", lines=len(shard.lines), closed=closed)
                if closed:
                    self._resources.waker.assemble()

    def _attempt(self, shard: ClaimedShard, kept: KeptLease) -> bool:
        return ShardRun(
            self._resources, self._on, shard, kept, stopping=self._stopping, clock=self._clock
        ).run()

    def _give_up(self, lease: queue.Lease) -> None:
        try:
            with self._resources.database.transaction() as transaction:
                queue.give_up(transaction, lease, now=session.now(transaction))
        except LeaseLost:
            log.info("lease lost, nothing to give up", shard=lease.id.hex)
