"""What becomes of a worker whose engine hangs? It ends, so that it is started anew.

Its leases fall, others run its lines, and the deaths counted on its shards find the line that hangs
engines. Without this the process would renew them for ever, and look alive.
"""

import faulthandler
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import structlog

log = structlog.get_logger()

WARM_UP = 5
"""A first step may compile, capture and allocate: it gets so many times the limit."""

POLLS = 20
"""Within the limit one looks so often. Looks are counted, not seconds: a process that was stopped
for a while, with all its threads, does not hang."""

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Doing:
    """What is under way: a number that changes with each piece of work, and its limit's factor."""

    serial: int
    patience: int = 1


def end() -> None:
    """No thread can be trusted to end in order: leave at once, and say where each one stands."""
    faulthandler.dump_traceback(_STDERR)
    os._exit(1)


class Watchdog:
    """A thread that ends the process once one of `watched` has done the same for `limit_s`."""

    def __init__(
        self,
        watched: Mapping[str, Callable[[], Doing | None]],
        *,
        limit_s: float,
        end: Callable[[], None] = end,
    ) -> None:
        self._watched = watched
        self._limit_s = limit_s
        self._end = end
        self._seen: dict[str, tuple[Doing, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Look once at each of them."""
        for name, doing in self._watched.items():
            now = doing()
            before, looks = self._seen.pop(name, (None, 0))
            if now is None:
                continue
            looks = looks + 1 if now == before else 0
            self._seen[name] = now, looks
            if looks > POLLS * now.patience:
                log.error(
                    "no progress for too long; the worker ends, to be started anew",
                    what=name,
                    limit_s=self._limit_s * now.patience,
                )
                self._end()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._limit_s / POLLS):
                self.look()
                self._arm()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        """A step that keeps the interpreter to itself keeps this thread from looking, too: then a
        timer that needs no interpreter ends the process."""
        patience = max((doing.patience for doing, _ in self._seen.values()), default=1)
        # Later than `look` would: that one says what hangs.
        after_s = self._limit_s * (patience + 1)
        faulthandler.dump_traceback_later(after_s, exit=True, file=_STDERR)
