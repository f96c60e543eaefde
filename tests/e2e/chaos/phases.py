"""Where in a batch's way does a fault strike? Each phase is held there, at whatever pace.

A hold takes hold before the batch is made; `reached` waits until the work stands at it. Validate,
plan and write back wait inside Postgres in the middle of their transaction, drain in the engine
with half the lines flushed, assemble at the store with the first result file on its way, upload in
the middle of the request's body.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Protocol

import httpx
import psycopg

from tests.e2e.chaos.stack import LOCKS, Stack, until

REACH_S = 60.0


class Phase(StrEnum):
    """A column of the table."""

    UPLOAD = "upload"
    VALIDATE = "validate"
    PLAN = "plan"
    DRAIN = "drain"
    WRITE_BACK = "write back"
    ASSEMBLE = "assemble"


class Hold(Protocol):
    """Work that stands still at one place."""

    def reached(self, batch: str | None, /) -> None:
        """Wait until the batch stands there."""

    def holder(self) -> str:
        """The part that does the work."""

    def release(self) -> None:
        """Let it go on. Twice is fine."""


class InPostgres:
    """By an advisory lock that a trigger waits for."""

    def __init__(self, stack: Stack, word: str) -> None:
        self._stack, self._lock = stack, LOCKS[word]
        self._table = "shards" if word == "write_back" else "stages"
        self._connection = psycopg.connect(stack.database_url, autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(%s)", (self._lock,))

    def reached(self, _batch: str | None, /) -> None:
        waiting = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s"
        )
        until(lambda: self._stack.query(waiting, self._lock), REACH_S, "the work waits in Postgres")

    def holder(self) -> str:
        return worker(self._stack, self._table)

    def release(self) -> None:
        with suppress(psycopg.OperationalError):
            self._connection.close()


class InEngine:
    """By the engine's control file."""

    def __init__(self, stack: Stack, flushed: int) -> None:
        self._stack, self._flushed = stack, flushed
        self._file = stack.control / "hold"
        self._file.touch()

    def reached(self, batch: str | None, /) -> None:
        done = "SELECT 1 FROM batches WHERE id = %s AND completed >= %s"
        until(lambda: self._stack.query(done, batch, self._flushed), REACH_S, "half is flushed")
        until(lambda: worker(self._stack, "shards"), REACH_S, "a shard is claimed")

    def holder(self) -> str:
        return worker(self._stack, "shards")

    def release(self) -> None:
        self._file.unlink(missing_ok=True)


class AtStore:
    """By the relay, which keeps the request back."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        stack.relay.hold(b"PUT /halfrate/results/")

    def reached(self, _batch: str | None, /) -> None:
        until(lambda: self._stack.relay.held, REACH_S, "a result file is on its way")

    def holder(self) -> str:
        return worker(self._stack, "stages")

    def release(self) -> None:
        self._stack.relay.release()


class InBody:
    """By the client, which stops in the middle of what it sends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._halfway = self._released = False

    def body(self) -> Iterator[bytes]:
        """The file's bytes, the second half once it is released."""
        half = len(self._data) // 2
        yield self._data[:half]
        self._halfway = True
        until(lambda: self._released, 120, "released")
        yield self._data[half:]

    def reached(self, _batch: str | None, /) -> None:
        until(lambda: self._halfway, REACH_S, "half is sent")

    def holder(self) -> str:
        return "api"

    def release(self) -> None:
        self._released = True


def worker(stack: Stack, table: str) -> str:
    """The part that holds a claim in that table, "" where none does."""
    query = f"SELECT worker FROM {table} WHERE state = 'leased' ORDER BY attempt DESC"  # noqa: S608
    rows = stack.query(query)
    for (name,) in rows:
        with suppress(StopIteration):
            return stack.named(int(str(name).rsplit(":", 1)[1]))
    return ""


def persistently(stack: Stack, ask: "Ask") -> httpx.Response:
    """As a client does it that does not give up: asked again after every cut and every 5xx."""
    deadline = time.monotonic() + 120
    while True:
        try:
            reply = ask(stack.http)
            if reply.status_code < 500:
                reply.raise_for_status()
                return reply
            problem = reply.text
        except (httpx.TransportError, httpx.StreamError) as error:
            problem = repr(error)
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)


class Ask(Protocol):
    """One request."""

    def __call__(self, http: httpx.Client, /) -> httpx.Response: ...
