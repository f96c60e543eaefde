"""What does every request get, whatever happens inside? An id, a log line, and an answer."""

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import ids
from service.api.errors import crashed
from service.clock import Clock

CLIENT_GONE = 499
"""Logged, never sent, as nginx does: there was nobody left to answer."""

LONGEST_PATH = 200

_log = structlog.get_logger(__name__)


class Envelope:
    """The outermost ASGI layer. A crash anywhere within has shape and id too."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self.app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; lifespan events pass."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = ids.show(ids.Prefix.REQUEST, ids.new_id())
        begun, status = self._clock(), 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, stamped)
            except ClientDisconnect:
                status = CLIENT_GONE
            except Exception:  # noqa: BLE001 - the last line of defence
                # Whatever it is, the client gets an answer and the log gets the traceback. Where
                # an answer had begun, the server cuts it off.
                _log.exception("request crashed", status=status)
                if not status:
                    await crashed()(scope, receive, stamped)
            _log.info(
                "request",
                method=scope["method"],
                path=scope["path"][:LONGEST_PATH],
                status=status,
                ms=round((self._clock() - begun) * 1000),
                project=scope.get("state", {}).get("project"),
            )
