"""How do several shards share one engine? One thread steps it; each shard has its own inbox.

An engine belongs to one thread. Shards hand requests in and take results out by queues, so the
engine goes from shard to shard without running empty.
"""

import queue as queues
import signal
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Self, assert_never

import structlog

from engine.request import (
    Classification,
    Embedding,
    Failure,
    Generation,
    Request,
    Result,
    TokenClassification,
)
from engine.surface import EngineLike
from service.clock import Clock

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
        self._busy_s = 0.0
        self._tokens = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(None)
        self._thread.join()

    @property
    def dimensions(self) -> int | None:
        """Length of the model's vectors; None where it makes none."""
        return self._engine.dimensions

    def speed(self) -> float | None:
        """Tokens a second while it had work, since the last call; None without enough to tell."""
        tokens, busy_s = self._tokens, self._busy_s
        if busy_s < 1:
            return None
        self._tokens, self._busy_s = 0, 0.0
        return tokens / busy_s

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Hand requests in; their results come to `inbox`."""
        self._commands.put(_Submit(requests, inbox))

    def abort(self, ids: Sequence[Hashable]) -> None:
        """Drop requests; results that were on their way may still come."""
        self._commands.put(_Abort(ids))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.pending:
                    self._step()
        # Without this thread the worker only pretends to live: end it, so that it is restarted.
        except Exception:
            log.exception("engine loop ended; the worker stops")
            self._lose(EngineBroken("the engine loop ended"))
            signal.raise_signal(signal.SIGTERM)

    def _step(self) -> None:
        started = self._clock()
        try:
            results = self._engine.step()
        # The loop must outlive its step: other shards' lines wait for this engine.
        except Exception as error:
            log.exception("engine step failed; the engine is made anew")
            self._lose(EngineBroken(str(error)))
            self._engine = self._make()
            return
        self._busy_s += self._clock() - started
        for result in results:
            self._tokens += _tokens(result)
            inbox = self._inboxes.pop(result.id, None)
            if inbox is not None:
                inbox.results.put(result)

    def _take_commands(self) -> bool:
        """Take what was handed in, waiting where there is nothing else to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.pending)
            except queues.Empty:
                return True
            match command:
                case None:
                    return False
                case _Submit(requests, inbox):
                    self._inboxes.update((request.id, inbox) for request in requests)
                    self._engine.submit(requests)
                case _Abort(ids):
                    self._engine.abort(ids)
                    for request_id in ids:
                        self._inboxes.pop(request_id, None)

    def _lose(self, broken: EngineBroken) -> None:
        for inbox in {id(inbox): inbox for inbox in self._inboxes.values()}.values():
            inbox.results.put(broken)
        self._inboxes.clear()


def _tokens(result: Result) -> int:
    match result:
        case Embedding() | Classification() | TokenClassification():
            return result.input_tokens
        case Generation():
            return result.input_tokens + result.output_tokens
        case Failure():
            return 0
        case unreachable:
            assert_never(unreachable)
