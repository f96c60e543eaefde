"""How is a JSON body read? Up to a limit, strictly, and after the key has been checked.

Not by the framework, which reads a body of any size before it asks who is calling.
"""

import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.api.errors import invalid
from service.errors import BadRequest, TooLarge

MAX_KEYS = 1_000
"""Of one object. No body of ours has a tenth of it, and to name each of 100,000 wrong keys would
hold up every other request."""

M = TypeVar("M", bound=BaseModel)


async def read_json(
    request: Request, model: type[M], *, max_bytes: int, optional: bool = False
) -> M:
    """The body as `model`. Raises 400 naming what is wrong with it, and 413.

    `optional`: no body is an empty object.
    """
    body = await _read(request, max_bytes)
    return parse(body or b"{}" if optional else body, model)


def parse(body: bytes, model: type[M]) -> M:
    """The bytes as `model`. Lone surrogates pass the JSON and are refused by name in the model."""
    if not body.strip():
        raise BadRequest("The request body is empty; a JSON object is needed.", code="invalid_json")
    try:
        value = json.loads(body, parse_constant=_refuse, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(
            f"The request body is not valid JSON: {reason[:200]}", code="invalid_json"
        ) from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error, given=value) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {max_bytes} bytes.", code="body_too_large")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has more than {MAX_KEYS} keys")
    return dict(pairs)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
