"""What does every request get, whatever happens inside? An id, headers, a log line, an answer."""

import structlog
from anyio import fail_after
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import ids
from service.api.courtesy import Courtesy
from service.api.errors import crashed, from_service
from service.clock import Clock
from service.errors import TooSlow, Unavailable

CLIENT_GONE = 499
"""Logged, never sent, as nginx does: there was nobody left to answer."""

LONGEST_PATH = 200

PATIENCE_S = 30.0
"""A body of which nothing more has come for so long is given up: its sender holds a place."""

HEALTH = "/health/"
"""Answered however busy the process is, or a busy one would be taken for a dead one."""

HEADERS = {
    # Replies are data, of one project, and no page: nobody stores, frames or guesses at them.
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every reply that does not say otherwise itself. HSTS belongs to whatever speaks TLS."""

_log = structlog.get_logger(__name__)


class Envelope:
    """The outermost ASGI layer. A crash anywhere within has shape and id too."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        courtesy: Courtesy | None = None,
        max_requests: int = 1_000,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.app = app
        self._clock = clock
        self._max_requests = max_requests
        self._patience_s = patience_s
        self._courtesy = Courtesy() if courtesy is None else courtesy
        self._under_way = 0  # counted on one event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; lifespan events pass."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = ids.show(ids.Prefix.REQUEST, ids.new_id())
        begun, status = self._clock(), 0
        asking = self._courtesy.arrive()

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._courtesy.leave(asking)
                _add_headers(message, scope, request_id)
            await send(message)

        body_ended = carries = False

        async def patient() -> Message:
            nonlocal body_ended, carries
            # After the body, and beside an answer, this waits for the client to go away.
            if body_ended or status:
                return await receive()
            if carries:
                await self._courtesy.stand_aside()
            try:
                with fail_after(self._patience_s):
                    message = await receive()
            except TimeoutError as error:
                raise TooSlow(
                    f"Nothing more of the request's body came for {self._patience_s:g} s."
                ) from error
            body_ended = not message.get("more_body", False)
            if not body_ended:
                # In several pieces come files, whose senders expect to wait.
                carries = True
                self._courtesy.leave(asking)
            return message

        self._under_way += 1
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._serve(scope, patient, stamped)
            except ClientDisconnect:
                status = CLIENT_GONE
            except Exception:  # noqa: BLE001 - the last line of defence
                # Whatever it is, the client gets an answer and the log gets the traceback. Where
                # an answer had begun, the server cuts it off.
                _log.exception("request crashed", status=status)
                if not status:
                    await crashed()(scope, receive, stamped)
            finally:
                self._under_way -= 1
                self._courtesy.leave(asking)
            _log.info(
                "request",
                method=scope["method"],
                path=scope["path"][:LONGEST_PATH],
                status=status,
                ms=round((self._clock() - begun) * 1000),
                project=scope.get("state", {}).get("project"),
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._under_way > self._max_requests and not scope["path"].startswith(HEALTH):
            busy = Unavailable("Too many requests are under way. Please try again shortly.")
            await from_service(busy)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _add_headers(message: Message, scope: Scope, request_id: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in HEADERS.items():
        headers.setdefault(name, value)
    for name, value in scope.get("state", {}).get("headers", {}).items():
        headers[name] = value
    headers["x-request-id"] = request_id
