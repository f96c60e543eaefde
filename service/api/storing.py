"""How are a client's bytes stored so that a failure leaves neither row nor object behind?"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from anyio import CancelScope, WouldBlock
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.api.deps import Parts
from service.errors import Unavailable
from service.storage import ObjectWriter, StorageError

Forget = Callable[[Session], None]
"""Removes the row that goes with the object; no row is fine."""

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def stored(parts: Parts, key: str, forget: Forget) -> AsyncIterator[ObjectWriter]:
    """A writer for `key`, which the block writes, finishes and records.

    Whatever ends the block early, a client that went away included: nothing is left. Raises
    Unavailable where too many are at it: each holds up to two parts of its object in memory.
    """
    place = object()
    try:
        parts.uploads.acquire_on_behalf_of_nowait(place)
    except WouldBlock as error:
        raise Unavailable("Too many uploads are under way. Please try again shortly.") from error
    try:
        writer = parts.storage.writer(key)
        try:
            yield writer
        except BaseException:
            with CancelScope(shield=True):
                await run_sync(withdraw, parts, writer, key, forget, limiter=parts.writers)
            raise
    finally:
        parts.uploads.release_on_behalf_of(place)


def withdraw(parts: Parts, writer: ObjectWriter, key: str, forget: Forget) -> None:
    """Undo what was stored under `key`. The row goes first: a row without bytes would be a lie,
    bytes without a row only take room."""
    writer.abort()
    try:
        with parts.database.transaction() as session:
            forget(session)
        parts.storage.delete([key])
    except (SQLAlchemyError, StorageError) as error:
        reason = str(error).splitlines()[0]
        _log.warning("failed upload not withdrawn", key=key, reason=reason)
