"""How do several shards share one engine? One thread steps it; each shard has its own inbox.

An engine belongs to one thread. Shards hand requests in and take results out by queues, so the
engine goes from shard to shard without running empty.
"""

import queue as queues
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Self

import structlog

from engine.request import Failure, Generation, Request, Result
from engine.surface import Counters, EngineLike
from service.clock import Clock
from service.db.workers import Figures
from worker.figures import Recent, Seats, Standstill, later_tokens, percentile, tokens_of, weight_of
from worker.watchdog import WARM_UP, Doing

log = structlog.get_logger()


class EngineBroken(Exception):
    """The engine raised where it should have answered; its requests are lost, not their lines."""


@dataclass(eq=False, slots=True)
class Inbox:
    """Where one shard's results arrive. `take` raises EngineBroken when there will be none."""

    results: "queues.SimpleQueue[Result | EngineBroken]" = field(default_factory=queues.SimpleQueue)

    def take(self, timeout_s: float) -> list[Result]:
        """All results there are, waiting at most so long for the first."""
        taken: list[Result] = []
        try:
            item = self.results.get(timeout=timeout_s)
            while True:
                if isinstance(item, EngineBroken):
                    raise item
                taken.append(item)
                item = self.results.get_nowait()
        except queues.Empty:
            return taken


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: Sequence[Request]
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class _Abort:
    ids: Sequence[Hashable]


class EngineLoop:
    """Steps one engine while it has requests, in a thread of its own."""

    def __init__(self, make: Callable[[], EngineLike], *, clock: Clock, name: str) -> None:
        self._make = make
        self._clock = clock
        self._engine = make()
        self._commands: queues.SimpleQueue[_Submit | _Abort | None] = queues.SimpleQueue()
        self._inboxes: dict[Hashable, Inbox] = {}
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        # What the engines before this one did: a step that raised has cost their counters.
        self._past = Counters()
        self._handed_in, self._taken = 0, 0
        self._handing = threading.Lock()
        self._still = Standstill(clock)
        self._begun = 0  # steps
        self._warm = False  # whether this engine has done a step
        self._stepping = False
        self._seats = Seats()
        self._lines, self._firsts, self._laters = Recent(), Recent(), Recent()
        self._busy_s = 0.0
        self._tokens = self._weight = self._computed = self._useful = 0
        # Tokens, their weight and seconds when the speed was last measured, and what it was.
        self._measured = (0, 0, 0.0)
        self._speed: float | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(None)
        self._thread.join()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what the model scores; empty where it has none."""
        return self._engine.labels

    def hungry(self, coming: int) -> bool:
        """Whether seats may stay empty, though `coming` lines are about to be handed in.

        As many as run should wait: those of a shard do not end together.
        """
        seats = self._engine.status.seats
        return seats is not None and self._pending + coming < 2 * seats

    @property
    def _pending(self) -> int:
        """Requests handed in and not yet answered."""
        return self._handed_in - self._taken + self._engine.pending

    def speed(self) -> float | None:
        """Tokens' worth of work a second while it had any, as plans weigh it; since the last call.

        None without enough to tell.
        """
        now = self._tokens, self._weight, self._busy_s
        tokens, weight, busy_s = (a - b for a, b in zip(now, self._measured, strict=True))
        if busy_s < 1:
            return None
        self._measured = now
        self._speed = tokens / busy_s
        return weight / busy_s

    def shard(self) -> AbstractContextManager[None]:
        """While a shard is open, time in which the engine has nothing to do is counted as idle."""
        return self._still.shard()

    def doing(self) -> Doing | None:
        """The step that is under way, or that an engine is made anew after."""
        return Doing(self._begun, 1 if self._warm else WARM_UP) if self._stepping else None

    def expect(self, *, more: bool) -> None:
        """Whether, as far as is known, shards wait that nobody has claimed."""
        self._seats.more = more

    def answered(self, seconds: Iterable[float]) -> None:
        """Lines have their answers, after these shares of the engine's time."""
        self._lines.add(seconds)

    def figures(self) -> Figures:
        """What it did since it started, and how it runs now."""
        engine, idle_s = self._engine, self._still.seconds
        counters, status = self._past + engine.counters, engine.status
        lines, lines_s, last = self._lines.read()
        firsts, firsts_s, last_firsts = self._firsts.read()
        laters, laters_s, last_laters = self._laters.read()
        return Figures(
            path=status.path,
            same_bytes=status.same_bytes,
            token_budget=status.token_budget,
            memory_bytes=status.memory_bytes,
            requests=counters.requests,
            failures=counters.failures,
            input_tokens=counters.input_tokens,
            output_tokens=counters.output_tokens,
            computed_tokens=self._computed,
            padding_tokens=self._computed - self._useful,
            steps=counters.steps,
            rows=counters.rows,
            twins=counters.twins,
            out_of_memory=counters.out_of_memory,
            non_finite=counters.non_finite,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            cached_tokens=counters.cached_tokens,
            preempted=counters.preempted,
            guessed_tokens=counters.guessed_tokens,
            guessed_right=counters.guessed_right,
            running=self._seats.running,
            seats=self._seats.possible,
            kv_held=status.kv_held,
            kv_tokens=status.kv_tokens,
            queue_depth=self._pending,
            open_shards=self._still.open_shards,
            busy_s=self._busy_s,
            idle_s=idle_s,
            tokens_per_s=self._speed,
            lines=lines,
            lines_s=lines_s,
            line_p50_s=percentile(last, 0.5),
            line_p95_s=percentile(last, 0.95),
            firsts=firsts,
            firsts_s=firsts_s,
            first_p50_s=percentile(last_firsts, 0.5),
            first_p95_s=percentile(last_firsts, 0.95),
            laters=laters,
            laters_s=laters_s,
            later_p50_s=percentile(last_laters, 0.5),
            later_p95_s=percentile(last_laters, 0.95),
        )

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Hand requests in; their results come to `inbox`."""
        with self._handing:
            self._handed_in += len(requests)
        self._commands.put(_Submit(requests, inbox))

    def abort(self, ids: Sequence[Hashable]) -> None:
        """Drop requests; results that were on their way may still come."""
        self._commands.put(_Abort(ids))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.pending:
                    self._still.work(working=True)
                    self._begun += 1
                    self._stepping = True
                    self._step()
                    self._stepping = False
        # Without this thread the worker only pretends to live: end it, so that it is restarted.
        except Exception:
            log.exception("engine loop ended; the worker stops")
            self._lose(EngineBroken("the engine loop ended"))
            signal.raise_signal(signal.SIGTERM)

    def _step(self) -> None:
        started, before = self._clock(), self._engine.counters
        try:
            results = self._engine.step()
        # The loop must outlive its step: other shards' lines wait for this engine.
        except Exception as error:
            log.exception("engine step failed; the engine is made anew")
            self._lose(EngineBroken(str(error)))
            self._past += self._engine.counters
            self._warm = False
            self._engine = self._make()
            return
        self._busy_s += self._clock() - started
        self._warm = True
        self._seats.note(before, self._engine.counters)
        for result in results:
            self._count(result)
            inbox = self._inboxes.pop(result.id, None)
            if inbox is not None:
                inbox.results.put(result)

    def _take_commands(self) -> bool:
        """Take what was handed in, waiting where there is nothing else to do. False: stop."""
        while True:
            idle = not self._engine.pending
            if idle:
                self._still.work(working=False)
            try:
                command = self._commands.get(block=idle)
            except queues.Empty:
                return True
            match command:
                case None:
                    return False
                case _Submit(requests, inbox):
                    self._inboxes.update((request.id, inbox) for request in requests)
                    self._engine.submit(requests)
                    self._taken += len(requests)
                case _Abort(ids):
                    self._engine.abort(ids)
                    for request_id in ids:
                        self._inboxes.pop(request_id, None)

    def _count(self, result: Result) -> None:
        if isinstance(result, Failure):
            return
        tokens, computed = tokens_of(result), result.work.computed_tokens
        later = later_tokens(result)
        if isinstance(result, Generation) and computed:
            self._firsts.add([result.work.first_token_s])
        if later and computed:
            self._laters.add([result.work.later_tokens_s / later])
        self._tokens += tokens
        self._weight += weight_of(result)
        self._computed += computed
        self._useful += min(tokens, computed)

    def _lose(self, broken: EngineBroken) -> None:
        for inbox in {id(inbox): inbox for inbox in self._inboxes.values()}.values():
            inbox.results.put(broken)
        self._inboxes.clear()
