"""How does an exception become an answer? Always with the four keys of the contract's error."""

import json
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from service.errors import BadRequest, ServiceError, Unavailable
from service.faults import LONGEST_PARAM, first_fault
from service.storage import StorageError
from service.wire import ErrorReply

_log = structlog.get_logger(__name__)

_DOCUMENTED = {
    400: "The request is wrong; `param` names where.",
    401: "No API key, or a wrong one.",
    403: "The key lacks the right.",
    404: "No such object in the key's project.",
    408: "The request's body stopped coming.",
    409: "The object's state forbids it.",
    413: "More bytes than the limit.",
    416: "The range begins behind the end.",
    429: "Too many requests of this key; `retry-after` says in how many seconds it may go on.",
    500: "Something of this service is broken.",
    503: "A part is away, or too much is under way; try again after `retry-after` seconds.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: the errors it can answer with, beside those every route can."""
    return {
        status: {"model": ErrorReply, "description": _DOCUMENTED[status]}
        for status in sorted({*statuses, 401, 403, 429, 500, 503})
    }


def error_response(
    status: int,
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer in the contract's shape. ASCII, so that no text a client sent can break it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Response(
        json.dumps({"error": error}),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def crashed() -> Response:
    """The answer where something of ours is broken."""
    return error_response(
        500,
        "The server had an error while processing your request. The x-request-id header names it"
        " in the server's log.",
        kind="server_error",
        code="internal_error",
    )


def from_service(error: ServiceError) -> Response:
    """The answer that the error is."""
    return error_response(
        error.status,
        error.message,
        kind=error.kind,
        param=error.param,
        code=error.code,
        headers=error.headers,
    )


def invalid(
    error: ValidationError | RequestValidationError, *, given: object, skip: int = 0
) -> BadRequest:
    """What pydantic found wrong in `given`, as the client's 400."""
    fault = first_fault(error, given=given, skip=skip)
    return BadRequest(fault.message, param=fault.param, code=fault.code)


async def on_service_error(_request: Request, error: Exception) -> Response:
    """A ServiceError says itself what it is."""
    if not isinstance(error, ServiceError):
        raise error
    return from_service(error)


async def on_invalid(request: Request, error: Exception) -> Response:
    """A query parameter of the wrong kind; its place begins with the word `query`."""
    if not isinstance(error, RequestValidationError):
        raise error
    return from_service(invalid(error, given=dict(request.query_params), skip=1))


async def on_http(request: Request, error: Exception) -> Response:
    """What the framework answers by itself: no such route, no such method."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path[:LONGEST_PARAM]
    headers = error.headers
    if error.status_code == 404:
        code, message = "unknown_url", f"Invalid URL ({request.method} {path})."
    elif error.status_code == 405:
        code, message = "method_not_allowed", f"{path} does not take {request.method}."
        if methods := _methods(request):
            headers = {"allow": ", ".join(methods)}
    else:
        code, message = "http_error", str(error.detail)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return error_response(error.status_code, message, kind=kind, code=code, headers=headers)


def _methods(request: Request) -> list[str]:
    """All that the path takes: the framework names those of its first route only."""
    return sorted(
        method.upper()
        for template, operations in request.app.openapi()["paths"].items()
        if compile_path(template)[0].match(request.scope["path"])
        for method in operations
    )


async def on_part_away(_request: Request, error: Exception) -> Response:
    """The database or the store did not answer: worth another try."""
    part = "store" if isinstance(error, StorageError) else "database"
    _log.warning("part away", part=part, reason=str(error).splitlines()[0])
    return from_service(
        Unavailable(f"The {part} does not answer at the moment. Please try again shortly.")
    )


async def on_crash(_request: Request, _error: Exception) -> Response:
    """Anything else; the envelope logs it."""
    return crashed()


HANDLERS: dict[int | type[Exception], Any] = {
    ServiceError: on_service_error,
    RequestValidationError: on_invalid,
    HTTPException: on_http,
    OperationalError: on_part_away,
    InterfaceError: on_part_away,
    PoolTimeout: on_part_away,
    StorageError: on_part_away,
    Exception: on_crash,
}
