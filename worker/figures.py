"""How does an engine spend its time, and how long do lines take it? Counted, never asked twice."""

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.request import Encoded, Generation
from engine.surface import Counters
from service.clock import Clock
from service.db.lines import Effort

OUTPUT_WEIGHT = 4
"""A generated token costs about as much as so many prompt tokens, which run many at a time."""

RECENT = 2_048
"""Durations that are kept, for their percentiles."""


class Standstill:
    """Seconds for which the engine had nothing to do although shards were open. Thread-safe.

    A device that never waits (for tokenising, for the store) leaves it at what the first shard
    needs to be read and the last one to be written.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0
        self._working = False
        self._seconds = 0.0
        self._since = clock()

    @contextmanager
    def shard(self) -> Iterator[None]:
        """A shard is open: there is work that the engine has, or should have."""
        self._turn(opened=1)
        try:
            yield
        finally:
            self._turn(opened=-1)

    def work(self, working: bool) -> None:
        """The engine begins to work, or has nothing left to do."""
        if working is not self._working:  # only the engine's own thread changes it
            self._turn(working=working)

    @property
    def open_shards(self) -> int:
        """How many are open now."""
        return self._open

    @property
    def seconds(self) -> float:
        """All of them so far."""
        self._turn()
        return self._seconds

    def _turn(self, *, opened: int = 0, working: bool | None = None) -> None:
        with self._lock:
            now = self._clock()
            if self._open and not self._working:
                self._seconds += now - self._since
            self._since = now
            self._open += opened
            self._working = self._working if working is None else working


@dataclass(slots=True)
class Seats:
    """How many sequences ran, and how many could have, step by step, while there was more to run.

    Once the last shard is claimed (`more` is false), steps that are not full are the tail: nobody
    is there to sit down.
    """

    more: bool = False
    running: int = 0
    possible: int = 0

    def note(self, before: Counters, after: Counters) -> None:
        """What the engine had counted before a step, and after it."""
        running, possible = after.running - before.running, after.seats - before.seats
        if self.more or running >= possible:
            self.running += running
            self.possible += possible


class Recent:
    """How long things took: the number and sum of all, percentiles of the last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[float] = deque(maxlen=RECENT)
        self._count = 0
        self._sum = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        """More of it."""
        with self._lock:
            for each in seconds:
                self._last.append(each)
                self._count += 1
                self._sum += each

    def read(self) -> tuple[int, float, Sequence[float]]:
        """How many there were, their seconds, and those of the last few, ascending."""
        with self._lock:
            return self._count, self._sum, sorted(self._last)


def effort_of(results: Iterable[Encoded | Generation]) -> Effort:
    """What these answers cost, all together; nothing where a twin's was taken."""
    computed = useful = rows = later = preempted = 0
    seconds = steps = first_s = later_s = 0.0
    for result in results:
        work = result.work
        if work.computed_tokens:
            computed += work.computed_tokens
            # Fewer were computed than it has where its beginning was computed for another.
            useful += min(work.computed_tokens, tokens_of(result))
            seconds += work.seconds
            rows += 1
            steps += 1 / max(1, work.rows)
            first_s += work.first_token_s
            later_s += work.later_tokens_s
            later += later_tokens(result)
            preempted += work.preempted
    return Effort(
        computed_tokens=computed,
        useful_tokens=useful,
        engine_s=seconds,
        engine_rows=rows,
        engine_steps=steps,
        first_token_s=first_s,
        later_tokens=later,
        later_tokens_s=later_s,
        preempted=preempted,
    )


def tokens_of(result: Encoded | Generation) -> int:
    """Those of an answer and of what was asked."""
    made = result.output_tokens if isinstance(result, Generation) else 0
    return result.input_tokens + made


def weight_of(result: Encoded | Generation) -> int:
    """Its tokens as plans weigh them."""
    made = result.output_tokens if isinstance(result, Generation) else 0
    return result.input_tokens + OUTPUT_WEIGHT * made


def later_tokens(result: Encoded | Generation) -> int:
    """Those of an answer that came after its first."""
    return max(0, result.output_tokens - 1) if isinstance(result, Generation) else 0


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """The least of the values that `share` of them do not exceed, as Postgres's percentile_disc."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
