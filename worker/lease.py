"""How does a claim stay alive while its work runs, and how does the work learn that it must end?"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self, assert_never

import structlog

from service.batch import Ask
from service.db import queue, session
from service.db.session import Database
from worker.watchdog import Doing

log = structlog.get_logger()


class Cancelling(Exception):
    """The batch was asked to end: hand the claim back."""


class KeptLease:
    """A lease that a Keeper renews. What is asked of it is set by the Keeper's thread."""

    def __init__(self, lease: queue.Lease) -> None:
        self.lease = lease
        self._lost = threading.Event()
        self._cancelling = threading.Event()
        self._pausing = threading.Event()

    @property
    def handing_back(self) -> bool:
        """Whether the batch is to end or to rest: flush what is finished and hand back."""
        return self._cancelling.is_set() or self._pausing.is_set()

    @property
    def cancelling(self) -> bool:
        """Whether the batch was asked to end: flush what is finished and hand back."""
        return self._cancelling.is_set()

    def check(self) -> None:
        """Raises LeaseLost once a renewal has found the claim gone."""
        if self._lost.is_set():
            raise queue.LeaseLost(self.lease)

    def check_cancelling(self) -> None:
        """As `check`, for work that a cancel ends: raises Cancelling too."""
        self.check()
        if self.cancelling:
            raise Cancelling

    def lose(self) -> None:
        """The claim is gone."""
        self._lost.set()

    def heed(self, asked: Ask) -> None:
        """Take note of what the batch asks."""
        match asked:
            case Ask.GO_ON:
                pass
            case Ask.PAUSE:
                self._pausing.set()
            case Ask.CANCEL:
                self._cancelling.set()
            case unreachable:
                assert_never(unreachable)


class Keeper:
    """A thread that renews every lease handed to it, every `every_s` seconds, and calls `also`."""

    def __init__(
        self,
        database: Database,
        *,
        lease: timedelta,
        every_s: float,
        also: Callable[[], None] | None = None,
    ) -> None:
        self._database = database
        self._lease = lease
        self._every_s = every_s
        self._also = also
        self._rounds = 0
        self._kept: dict[queue.Lease, KeptLease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def keep(self, lease: queue.Lease) -> Iterator[KeptLease]:
        """Renew `lease` until the block is left."""
        kept = KeptLease(lease)
        with self._lock:
            self._kept[lease] = kept
        try:
            yield kept
        finally:
            with self._lock:
                del self._kept[lease]

    def doing(self) -> Doing | None:
        """Its rounds, while it holds leases: they are to go on."""
        return Doing(self._rounds) if self._kept else None

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.renew()
            self._rounds += 1

    def renew(self) -> None:
        """Renew all once. A database that is away is tried again: the fence decides, not we."""
        with self._lock:
            kept = list(self._kept.values())
        for one in kept:
            try:
                self._renew(one)
            # Without this thread every claim of the process would fall: nothing may end it.
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("lease not renewed", lease=one.lease.id.hex, error=repr(error)[:200])
        if self._also is not None:
            try:
                self._also()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("heartbeat not written", error=repr(error)[:200])

    def _renew(self, one: KeptLease) -> None:
        try:
            with self._database.transaction() as transaction:
                until = session.now(transaction) + self._lease
                asked = queue.renew(transaction, one.lease, until=until)
        except queue.LeaseLost:
            one.lose()
        else:
            one.heed(asked)
