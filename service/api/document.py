"""What does the OpenAPI document say? What the service does, no more and no less."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api.errors import documented
from service.db.models import Right
from service.wire import (
    CompleteUpload,
    CreateBatch,
    CreateUpload,
    CreateWebhookEndpoint,
    RotateSecret,
    SampleEvent,
    UpdateWebhookEndpoint,
)

BODIES = (
    CreateBatch,
    CreateUpload,
    CompleteUpload,
    CreateWebhookEndpoint,
    UpdateWebhookEndpoint,
    RotateSecret,
    SampleEvent,
)
"""What is read by `service.api.body`, and so unknown to the framework."""

REF = "#/components/schemas/{model}"
NOT_OURS = ("HTTPValidationError", "ValidationError")

TEXT = {"type": "string"}
WHOLE = {"type": "string", "pattern": "^[0-9]+$"}
REQUEST_ID = {
    "x-request-id": {
        "description": "Names this request in the service's log.",
        "required": True,
        "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    }
}
ALLOWANCE = {
    "x-ratelimit-limit-requests": ("Requests a minute of this key, where there is a limit.", WHOLE),
    "x-ratelimit-remaining-requests": ("Requests left.", WHOLE),
    "x-ratelimit-reset-requests": (
        "When more are free.",
        {"type": "string", "pattern": "^[0-9]+s$"},
    ),
}
OWN_HEADERS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "401": {"www-authenticate": ("How to authenticate.", TEXT)},
    "409": {"x-should-retry": ("The official client does not try again.", TEXT)},
    "416": {"content-range": ("The object's size.", TEXT)},
    "429": {"retry-after": ("Seconds, at most 120.", WHOLE)},
    "503": {"retry-after": ("Seconds, at most 120.", WHOLE)},
}
"""Headers that every reply of that status has."""


def document(app: FastAPI) -> dict[str, Any]:
    """The document of the app's routes.

    The framework would add a 422 to each, which this service never answers, and leave out the
    bodies that it does not read itself.
    """
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path in made["paths"].values():
        for operation in path.values():
            _complete(operation)
    schemas = made["components"]["schemas"]
    for name in NOT_OURS:
        schemas.pop(name, None)
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    schemas.update(bodies["$defs"])
    return made


def role_of(operation: dict[str, Any]) -> Right | None:
    """The right that a key needs for it; None where no key is asked for."""
    roles = {
        role
        for scheme in operation.get("security", [])
        for each in scheme.values()
        for role in each
    }
    return max(map(Right, roles), key=list(Right).index) if roles else None


def _complete(operation: dict[str, Any]) -> None:
    """Its replies as they are: which there can be, and with which headers."""
    replies = operation["responses"]
    replies.pop("422", None)
    role = role_of(operation)
    if role is Right.READ:
        del replies["403"]  # there is no lesser key
    if "requestBody" in operation:
        replies["408"] = _reply(408)
    for status, reply in replies.items():
        headers = dict(REQUEST_ID)
        own = OWN_HEADERS.get(status, {}) if role is not None else {}
        headers |= {name: _header(*each, required=True) for name, each in own.items()}
        if role is not None and status not in ("401", "408", "500", "503"):
            headers |= {name: _header(*each) for name, each in ALLOWANCE.items()}
        reply.setdefault("headers", {}).update(headers)
    operation["responses"] = dict(sorted(replies.items()))


def _reply(status: int) -> dict[str, Any]:
    return {
        "description": documented(status)[status]["description"],
        "content": {"application/json": {"schema": {"$ref": REF.format(model="ErrorReply")}}},
    }


def _header(description: str, schema: dict[str, str], *, required: bool = False) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": schema}
