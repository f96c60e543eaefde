"""How does the API's server listen: what does it take of a connection, and when does it let go?"""

from collections.abc import Callable
from typing import Any

import uvicorn

LONGEST_HEADERS = 32 * 1024
"""Bytes of a request's line and headers; more is answered with a bare 400, by the server itself."""

KEEP_ALIVE_S = 75
"""Longer than clients and balancers keep an idle connection (5 to 60 s), so that they are the ones
who close it: a request sent into a closing connection would fail."""


def config(
    app: Callable[..., Any] | str,
    *,
    shutdown_s: int,
    factory: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> uvicorn.Config:
    """Requests under way at the end have `shutdown_s` seconds."""
    return uvicorn.Config(
        app,
        factory=factory,
        host=host,
        port=port,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,  # the app's own, which also knows the request id
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=shutdown_s,
    )
