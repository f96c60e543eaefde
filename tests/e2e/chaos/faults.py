"""What goes wrong? Each fault strikes while a phase is held, and lasts until its block is left.

Inside the block the phase is let go on, so that what lasts (a full disk, a stalled worker) meets
work that wants to proceed.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import redis
from celery import Celery

from tests.e2e.chaos.phases import Hold, Phase, persistently
from tests.e2e.chaos.stack import MODEL, Stack, until

STORE_AWAY_S = 5.0
STORE_LONG_AWAY_S = 30.0
TASKS = ("validate", "plan", "assemble", "clean", "remove", "deliver", "tick", "sweep")
TAKEN_OVER_S = 60.0


@dataclass(frozen=True)
class Struck:
    """What a fault is given."""

    stack: Stack
    phase: Phase
    hold: Hold
    batch: str | None  # hex; None during upload
    file: str | None


Fault = Callable[[Struck], AbstractContextManager[None]]
FAULTS: dict[str, Fault] = {}
ONLY: dict[str, frozenset[Phase]] = {}


def fault(
    name: str, *only: Phase
) -> Callable[[Callable[[Struck], Iterator[None]]], Callable[[Struck], Iterator[None]]]:
    """A row of the table, where it can happen at all."""

    def note(strike: Callable[[Struck], Iterator[None]]) -> Callable[[Struck], Iterator[None]]:
        FAULTS[name] = contextmanager(strike)
        ONLY[name] = frozenset(only or Phase)
        return strike

    return note


@fault("none")
def none(_: Struck) -> Iterator[None]:
    yield


@fault("API killed")
def api_killed(at: Struck) -> Iterator[None]:
    at.stack.kill("api")
    yield


@fault("CPU worker killed")
def cpu_killed(at: Struck) -> Iterator[None]:
    at.stack.kill(_of(at, "cpu"))
    yield


@fault("engine worker killed")
def engine_killed(at: Struck) -> Iterator[None]:
    at.stack.kill(_of(at, "engine"))
    yield


@fault("beat killed")
def beat_killed(at: Struck) -> Iterator[None]:
    at.stack.kill("beat")
    yield


@fault("Valkey emptied")
def valkey_emptied(at: Struck) -> Iterator[None]:
    with redis.Redis.from_url(at.stack.environment["HALFRATE_REDIS_URL"]) as client:
        client.flushall()
    yield


@fault("Valkey restarted empty")
def valkey_restarted(at: Struck) -> Iterator[None]:
    at.stack.kill("valkey")
    yield


@fault("Postgres restarted")
def postgres_restarted(at: Struck) -> Iterator[None]:
    at.stack.restart("postgres")
    yield


@fault("Postgres killed")
def postgres_killed(at: Struck) -> Iterator[None]:
    at.stack.kill("postgres")
    yield


@fault("SeaweedFS killed")
def store_killed(at: Struck) -> Iterator[None]:
    long = at.phase is Phase.WRITE_BACK
    at.stack.kill("seaweedfs", back_after_s=STORE_LONG_AWAY_S if long else STORE_AWAY_S)
    yield


@fault("connections cut")
def connections_cut(at: Struck) -> Iterator[None]:
    """All there are, and then the next replies in their midst."""
    at.stack.relay.cut(replies=12)
    yield


@fault("store disk full")
def disk_full(at: Struck) -> Iterator[None]:
    with at.stack.full_disk():
        yield
        time.sleep(STORE_AWAY_S)  # how long the disk stays full is the fault's own matter


@fault("messages doubled and reordered")
def messages_doubled(at: Struck) -> Iterator[None]:
    app = Celery("chaos", broker=at.stack.environment["HALFRATE_REDIS_URL"], set_as_current=False)
    app.conf.task_ignore_result = True
    sent = [*TASKS * 4, *["drain"] * 12]
    random.Random(6).shuffle(sent)
    for task in sent:
        drains = task == "drain"
        queue = f"engine.{MODEL}" if drains else "cpu"
        app.send_task(f"halfrate.{task}", args=[MODEL] if drains else [], queue=queue)
    app.close()
    yield


@fault("worker stalled past its lease")
def stalled(at: Struck) -> Iterator[None]:
    holder = at.hold.holder()
    claims = [] if holder == "api" else _claims(at, holder)
    with at.stack.stopped(holder):
        yield
        if holder == "api":
            time.sleep(3)  # a client's patience; there is no lease
        else:
            assert claims
            until(lambda: _taken_over(at, claims), TAKEN_OVER_S, "another worker took over")


@fault("clock two hours on")
def clock_forward(at: Struck) -> Iterator[None]:
    at.stack.execute("UPDATE chaos.clock SET step = '2 hours'")
    yield


@fault("clock five seconds back")
def clock_back(at: Struck) -> Iterator[None]:
    at.stack.execute("UPDATE chaos.clock SET step = '-5 seconds'")
    yield


@fault("input file deleted")
def input_deleted(at: Struck) -> Iterator[None]:
    if at.file is not None:
        persistently(at.stack, lambda http: http.delete(f"files/{at.file}"))
    yield


@fault("engine out of memory", Phase.DRAIN)
def out_of_memory(at: Struck) -> Iterator[None]:
    (at.stack.control / "oom").touch()
    yield


@fault("NaN from the engine", Phase.DRAIN)
def not_finite(at: Struck) -> Iterator[None]:
    (at.stack.control / "nan").touch()
    yield


@fault("engine step raises", Phase.DRAIN)
def step_raises(at: Struck) -> Iterator[None]:
    (at.stack.control / "raise").touch()
    yield


@fault("two assemblers at once", Phase.ASSEMBLE)
def two_assemblers(at: Struck) -> Iterator[None]:
    """The first one's claim falls although it lives; both stand before their last step."""
    fallen = "UPDATE stages SET lease_expires_at = '2000-01-01' WHERE batch_id = %s"
    at.stack.execute(fallen + " AND state = 'leased'", at.batch)
    until(lambda: at.stack.relay.held >= 2, TAKEN_OVER_S, "two of them write")
    yield


def _of(at: Struck, kind: str) -> str:
    """The part of that kind that does the held work, else any."""
    holder = at.hold.holder()
    return holder if holder.startswith(kind) else kind


def _claims(at: Struck, holder: str) -> list[tuple[str, object, object]]:
    """What the part holds: table, id and attempt."""
    pid = at.stack.member(holder).pid
    return [
        (table, *row)
        for table in ("stages", "shards")
        for row in at.stack.query(
            f"SELECT id, attempt FROM {table} WHERE state = 'leased' AND worker LIKE %s",  # noqa: S608
            f"%:{pid}",
        )
    ]


def _taken_over(at: Struck, claims: list[tuple[str, object, object]]) -> bool:
    """Whether each of them has had another attempt, or is not needed any more."""
    return not any(
        at.stack.query(
            f"SELECT 1 FROM {table} WHERE id = %s AND attempt = %s"  # noqa: S608
            " AND state IN ('leased', 'ready')",
            *claim,
        )
        for table, *claim in claims
    )
