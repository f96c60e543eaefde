"""How does an object's content go out to a client? Piece by piece; it is never held whole."""

from collections.abc import AsyncIterator, Generator

from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ContentResponse(StreamingResponse):
    """The bytes of an object, let go of as soon as the client has them or has gone away."""

    def __init__(
        self,
        first: bytes,
        rest: Generator[bytes],
        readers: CapacityLimiter,
        *,
        status_code: int,
        headers: dict[str, str],
        media_type: str,
    ) -> None:
        self._rest, self._readers = rest, readers
        super().__init__(
            self._pieces(first), status_code=status_code, headers=headers, media_type=media_type
        )

    async def _pieces(self, first: bytes) -> AsyncIterator[bytes]:
        """Each read in a thread of those for it: of the others, polls have need."""
        piece = first
        while piece:
            yield piece
            piece = await run_sync(next, self._rest, b"", limiter=self._readers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; then close the connection to the store, which a broken off read still holds."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await run_sync(self._rest.close, limiter=self._readers)
