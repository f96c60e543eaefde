"""What may a handler reach for? The parts that the process was started with."""

from dataclasses import dataclass, field
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from service.api.rate import RateLimiter
from service.catalog import Catalog
from service.db.session import Database
from service.outbound import Sender
from service.settings import Settings
from service.storage import Storage
from service.wake import Waker

JOINS = 4
"""Most uploads that a process joins at once; each takes a thread, of which there are 40."""

WRITERS = 4
"""Most threads that write to the store what clients upload: the others, and the interpreter's lock
with them, are left to requests that are answered in a moment."""

READERS = 8
"""Most threads that read from the store what clients download, a piece at a time by turns."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Made once at the entry point, handed to every request."""

    settings: Settings
    database: Database
    storage: Storage
    waker: Waker
    catalog: Catalog
    limiter: RateLimiter | None
    sender: Sender
    uploads: CapacityLimiter
    joins: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(JOINS))
    writers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(WRITERS))
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(READERS))


async def parts_of(request: Request) -> Parts:
    """The parts of the app that serves this request.

    A coroutine, since the framework would take a thread for a plain function.
    """
    parts = request.app.state.parts
    if not isinstance(parts, Parts):
        raise TypeError("create_app has not set the parts")
    return parts


Needs = Annotated[Parts, Depends(parts_of)]
