"""Is the process alive, and can it do its work? No key is needed to ask."""

from collections.abc import Callable
from typing import Literal

import structlog
from anyio import CapacityLimiter, create_task_group, fail_after
from anyio.to_thread import run_sync
from fastapi import APIRouter, Response
from kombu.exceptions import KombuError
from kombu.exceptions import OperationalError as BrokerError
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from service.api.deps import Needs, Parts
from service.storage import StorageError
from service.wire import Reply

PATIENCE_S = 3.0
"""A part that has not answered by then is not there."""

AWAY = (SQLAlchemyError, StorageError, BrokerError, KombuError, RedisError, OSError)

_log = structlog.get_logger(__name__)
router = APIRouter(prefix="/health", tags=["Health"])


class Live(Reply):
    """The process answers."""

    status: Literal["ok"]


class PartStates(Reply):
    """`ok`, or in a few words why not."""

    database: str
    broker: str
    store: str


class Ready(Reply):
    """Whether requests can be served now."""

    status: Literal["ok", "unavailable"]
    parts: PartStates


@router.get("/live")
async def live() -> Live:
    """200 as long as the process answers."""
    return Live(status="ok")


@router.get("/ready", responses={503: {"model": Ready, "description": "A part is away."}})
async def ready(parts: Needs, response: Response) -> Ready:
    """200 when every part answers, 503 when one does not."""
    found: dict[str, str] = {}
    # Not from the threads that serve requests: a part that hangs keeps its own for a while.
    limiter = CapacityLimiter(3)

    async def check(name: str, probe: Callable[[], None]) -> None:
        found[name] = await _state(name, probe, limiter)

    async with create_task_group() as checks:
        checks.start_soon(check, "database", lambda: _ping_database(parts))
        checks.start_soon(check, "broker", parts.waker.ping)
        checks.start_soon(check, "store", parts.storage.ping)
    states = PartStates(**found)
    if any(state != "ok" for state in found.values()):
        response.status_code = 503
        return Ready(status="unavailable", parts=states)
    return Ready(status="ok", parts=states)


async def _state(name: str, probe: Callable[[], None], limiter: CapacityLimiter) -> str:
    try:
        with fail_after(PATIENCE_S):
            await run_sync(probe, abandon_on_cancel=True, limiter=limiter)
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except AWAY as error:
        _log.warning("part not ready", part=name, reason=str(error).splitlines()[0:1])
        return "unreachable"
    return "ok"


def _ping_database(parts: Parts) -> None:
    with parts.database.transaction() as session:
        session.execute(text("SELECT 1"))
