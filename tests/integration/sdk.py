"""How is one test spoken by both official clients? The async one's answers are awaited for it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
from anyio.from_thread import BlockingPortal, start_blocking_portal
from openai.resources import AsyncBatches
from pydantic import BaseModel

Connect = Callable[..., Any]
"""`connect(key, **options)`: a client; what it is asked is asked in the official client's words."""


@contextmanager
def connecting(url: str, *, asynchronous: bool) -> Iterator[Connect]:
    """A maker of clients, unmodified ones; all are closed at the end."""
    with start_blocking_portal() as portal:
        clients: list[Any] = []

        def connect(key: str, **options: Any) -> Any:
            kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
            client = kind(base_url=f"{url}/v1", api_key=key, **options)
            clients.append(client)
            return Awaited(client, portal) if asynchronous else client

        yield connect
        for client in clients:
            if asynchronous:
                portal.call(client.close)
            else:
                client.close()


class Awaited:
    """An async client (or a resource of it) whose calls return when they are done."""

    def __init__(self, target: Any, portal: BlockingPortal) -> None:
        self._target = target
        self._portal = portal

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if isinstance(value, RESOURCE):
            return Awaited(value, self._portal)
        return self._called(value) if callable(value) else value

    def _called(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            # In the loop: some calls begin something before they are awaited.
            made = self._portal.call(lambda: method(*arguments, **named))
            if isinstance(made, AsyncIterator) or hasattr(made, "__aiter__"):
                return self._each(made)
            return self._portal.call(_awaited, made) if isinstance(made, Awaitable) else made

        return call

    def _each(self, items: Any) -> Iterator[Any]:
        iterator = aiter(items)
        while True:
            try:
                yield self._portal.call(lambda: _awaited(anext(iterator)))
            except StopAsyncIteration:
                return


RESOURCE = AsyncBatches.__mro__[1]
"""What the client's `files`, `batches`, `chat.completions` … are."""


async def _awaited(made: Awaitable[Any]) -> Any:
    return await made


def extras(model: BaseModel, place: str = "") -> Iterator[str]:
    """Where a reply holds what the official client's types do not know."""
    for name in model.model_extra or {}:
        yield f"{place}{name}"
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                yield from extras(item, f"{place}{name}.")
