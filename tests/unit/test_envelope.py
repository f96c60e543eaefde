"""How long does the envelope wait for a client? For a body, not for ever; beside an answer, yes."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from service.api.envelope import Envelope
from service.clock import monotonic
from service.errors import TooSlow

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
MORE = {"type": "http.request", "body": b"a", "more_body": True}
LAST = {"type": "http.request", "body": b"b", "more_body": False}
GONE = {"type": "http.disconnect"}
START = {"type": "http.response.start", "status": 200, "headers": []}


def served(app: Any, arriving: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is sent, where no message arrives at once and nothing is waited for."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        await anyio.lowlevel.checkpoint()
        return arriving.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    anyio.run(Envelope(app, clock=monotonic, patience_s=0), SCOPE, receive, send)
    return sent


@pytest.mark.parametrize("arriving", [[MORE, LAST], [LAST]])
def test_a_body_is_waited_for_with_patience(arriving: list[dict[str, Any]]) -> None:
    async def reads(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(TooSlow):
            await receive()
        await send(dict(START))

    assert [message.get("status") for message in served(reads, arriving)] == [200]


def test_a_client_s_leaving_is_waited_for_while_it_is_answered() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send(dict(START))
        assert await receive() == GONE
        await send({"type": "http.response.body"})

    assert len(served(answers, [dict(GONE)])) == 2
