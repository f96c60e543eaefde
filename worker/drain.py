"""How does an engine worker take shards? It claims until none is runnable, a few at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from uuid import UUID

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.clock import Clock
from service.db import queue, session
from service.db.queue import ClaimedShard, LeaseLost
from service.storage import MissingObject, StorageError
from worker.engine_loop import EngineBroken
from worker.execute import ModelOnLoop, ShardRun
from worker.lease import Keeper, KeptLease
from worker.resources import Resources

log = structlog.get_logger()

OUTAGES = (StorageError, OperationalError, InterfaceError, PoolTimeout)
"""The store or the database was away: no fault of the lines, however long it lasts."""

OUTAGE_WAIT = timedelta(seconds=2)

MORE = 4
"""So many times its slots are the most shards that a worker holds: a part of the store each time
it flushes, and a thread, for each."""


class Places:
    """Shards share the process; one that may end it has it to itself, all models included, so that
    nobody else's lines pay for its failures."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._left = threading.Condition()
        self._inside = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A place beside others."""
        with self._door, self._left:
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The whole engine, once the others have left; nobody comes in past whoever waits here."""
        with self._door:
            with self._left:
                self._left.wait_for(lambda: self._inside == 0)
            yield


class Drain:
    """Claims and runs shards of one model. Several threads may call it; `slots` of them work, and
    up to `MORE` times as many as long as the engine's seats are not sure to be taken."""

    def __init__(
        self,
        resources: Resources,
        on: ModelOnLoop,
        keeper: Keeper,
        places: Places,
        *,
        stopping: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._resources = resources
        self._on = on
        self._keeper = keeper
        self._stopping = stopping
        self._clock = clock
        self._places = places
        # While one shard's last lines run, the next shard's are already in the engine.
        self._slots = resources.worker_settings.slots
        self._at_work = threading.Lock()
        self._working = 0  # slots
        self._coming: dict[UUID, int] = {}  # by shard: lines that are claimed and not yet handed in

    def run(self) -> None:
        """Run shards until none is runnable or needed."""
        while not self._stopping() and self._enter():
            try:
                shard = self._claim()
                if shard is None:
                    return
                if self._has_room():
                    # There may be more than this: let another slot look.
                    self._resources.waker.drain(self._on.model.id)
                self._run(shard)
            finally:
                self._leave()

    def _enter(self) -> bool:
        """Take a slot, where there is one."""
        with self._at_work:
            if not self._has_room():
                return False
            self._working += 1
            return True

    def _leave(self) -> None:
        with self._at_work:
            self._working -= 1

    def _has_room(self) -> bool:
        """Whether one more shard should be run beside those that are."""
        if self._working < self._slots:
            return True
        return self._working < MORE * self._slots and self._on.loop.hungry(
            sum(tuple(self._coming.values()))
        )

    def _claim(self) -> ClaimedShard | None:
        with self._resources.database.transaction() as transaction:
            shard = queue.claim_shard(
                transaction,
                self._on.model.id,
                worker=self._resources.name,
                now=session.now(transaction),
                lease=self._resources.settings.lease,
            )
        self._on.loop.expect(more=shard is not None)
        if shard is not None:
            self._coming[shard.lease.id] = len(shard.lines)
        return shard

    def _run(self, shard: ClaimedShard) -> None:
        lease = shard.lease
        event = log.bind(batch=lease.batch_id.hex, shard=lease.id.hex, attempt=lease.attempt)
        alone = shard.failures > 0 or shard.deaths > 0
        place = self._places.alone if alone else self._places.shared
        with self._keeper.keep(lease) as kept, place():
            try:
                self._begin(lease)
                closed = self._attempt(shard, kept)
            except LeaseLost:
                event.info("lease lost, work dropped")
            # The loop must outlive its shard: the next one may be another tenant's.
            except OUTAGES as error:
                # The part that is away says so often enough; here one line does.
                event.warning("part away, shard to be tried again", reason=type(error).__name__)
                self._give_up(lease, error, alone=alone)
            except Exception as error:  # noqa: BLE001 - logged, and the claim given up
                event.exception("shard failed, to be tried again", alone=alone)
                self._give_up(lease, error, alone=alone)
            else:
                event.info("shard done", lines=len(shard.lines), closed=closed)
                if closed:
                    self._resources.waker.assemble()
            finally:
                self._coming.pop(lease.id, None)

    def _begin(self, lease: queue.Lease) -> None:
        with self._resources.database.transaction() as transaction:
            queue.begin(transaction, lease)

    def _attempt(self, shard: ClaimedShard, kept: KeptLease) -> bool:
        lease_id = shard.lease.id
        with self._on.loop.shard():
            return ShardRun(
                self._resources,
                self._on,
                shard,
                kept,
                stopping=self._stopping,
                clock=self._clock,
                handed_in=partial(self._handed_in, lease_id),
            ).run()

    def _handed_in(self, lease_id: UUID, lines: int) -> None:
        self._coming[lease_id] -= lines

    def _give_up(self, lease: queue.Lease, error: Exception, *, alone: bool) -> None:
        """Back to the queue; a failure is counted only where the shard itself may be at fault."""
        try:
            with self._resources.database.transaction() as transaction:
                now = session.now(transaction)
                if isinstance(error, EngineBroken) and not alone:
                    queue.suspect(transaction, lease, now=now)
                elif isinstance(error, OUTAGES) and not isinstance(error, MissingObject):
                    queue.hand_back(transaction, lease, not_before=now + OUTAGE_WAIT)
                else:
                    queue.give_up(transaction, lease, now=now)
        except LeaseLost:
            log.info("lease lost, nothing to give up", shard=lease.id.hex)
        except OUTAGES:
            log.warning("shard not given up, its lease will fall", shard=lease.id.hex)
