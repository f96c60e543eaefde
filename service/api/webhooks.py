"""How does a client say where it wants to hear of its batches?"""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar
from uuid import UUID

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from sqlalchemy.orm import Session

from service import ids, view, webhook
from service.api.auth import Administrator, Caller, Reader
from service.api.body import read_json
from service.api.deps import Needs, Parts
from service.api.errors import documented
from service.api.paging import cursor
from service.db import webhooks
from service.db.session import now
from service.db.webhook_models import WebhookEndpoint
from service.errors import BadRequest, NotFound
from service.outbound import NotAnswered, Why
from service.targets import BadTarget, check_public, target
from service.webhook import EventType
from service.wire import (
    CreateWebhookEndpoint,
    RotateSecret,
    SampleEvent,
    UpdateWebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointList,
    WebhookEndpointObject,
    WebhookEndpointTest,
    WebhookEndpointWithSecret,
    WebhookEventTypeList,
)

MAX_PAGE = 100

NOT_ANSWERED = {
    Why.FORBIDDEN: "its address is not public, and this service may call public addresses only",
    Why.UNKNOWN_NAME: "its name does not resolve",
    Why.TIMED_OUT: "it did not answer in time",
    Why.CONNECTION: "no connection could be made, or what it answered is not HTTP",
}

router = APIRouter(prefix="/v1", tags=["Webhooks"])

B = TypeVar("B", bound=BaseModel)


def _posted(model: type[B], *, optional: bool = False) -> Callable[..., Awaitable[B]]:
    async def read(request: Request, _caller: Administrator, parts: Needs) -> B:
        limit = parts.settings.max_body_bytes
        return await read_json(request, model, max_bytes=limit, optional=optional)

    return read


def _body(model: type[BaseModel], *, required: bool = True) -> dict[str, object]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


@router.post(
    "/webhook_endpoints",
    responses=documented(400, 413),
    openapi_extra=_body(CreateWebhookEndpoint),
)
def create_webhook_endpoint(
    posted: Annotated[CreateWebhookEndpoint, Depends(_posted(CreateWebhookEndpoint))],
    caller: Administrator,
    parts: Needs,
) -> WebhookEndpointWithSecret:
    """Have a URL called when batches end. The secret is shown now and never again."""
    _check_url(parts, posted.url)
    with parts.database.transaction() as session:
        endpoint, secret = webhooks.create(
            session,
            project_id=caller.project_id,
            name=posted.name,
            url=posted.url,
            event_types=posted.event_types,
            now=now(session),
        )
        return view.webhook_endpoint_with_secret(endpoint, secret)


@router.get("/webhook_endpoints", responses=documented(400))
def list_webhook_endpoints(
    caller: Reader,
    parts: Needs,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: str | None = None,
) -> WebhookEndpointList:
    """The project's webhook endpoints, newest first, a page at a time."""
    with parts.database.transaction() as session:

        def known(endpoint_id: UUID) -> bool:
            return webhooks.get(session, caller.project_id, endpoint_id) is not None

        behind = cursor(after, ids.Prefix.WEBHOOK_ENDPOINT, known, what="webhook endpoint")
        rows = webhooks.page(session, caller.project_id, after=behind, limit=limit + 1)
        return view.webhook_endpoint_list(rows, limit=limit)


@router.get("/webhook_endpoints/{webhook_endpoint_id}", responses=documented(404))
def retrieve_webhook_endpoint(
    webhook_endpoint_id: str, caller: Reader, parts: Needs
) -> WebhookEndpointObject:
    """One webhook endpoint."""
    with parts.database.transaction() as session:
        return view.webhook_endpoint(_known(session, caller, webhook_endpoint_id, webhooks.get))


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}",
    responses=documented(400, 404, 413),
    openapi_extra=_body(UpdateWebhookEndpoint),
)
def update_webhook_endpoint(
    webhook_endpoint_id: str,
    posted: Annotated[UpdateWebhookEndpoint, Depends(_posted(UpdateWebhookEndpoint))],
    caller: Administrator,
    parts: Needs,
) -> WebhookEndpointObject:
    """Change name, URL or events. Deliveries that are still to be made go to the new URL."""
    if posted.url is not None:
        _check_url(parts, posted.url)
    with parts.database.transaction() as session:
        endpoint = _known(session, caller, webhook_endpoint_id, webhooks.lock)
        for name, value in posted.model_dump(exclude_none=True).items():
            setattr(endpoint, name, value)
        if session.is_modified(endpoint):
            endpoint.updated_at = now(session)
        return view.webhook_endpoint(endpoint)


@router.delete("/webhook_endpoints/{webhook_endpoint_id}", responses=documented(404))
def delete_webhook_endpoint(
    webhook_endpoint_id: str, caller: Administrator, parts: Needs
) -> WebhookEndpointDeleted:
    """Forget an endpoint, with whatever it was still to be told."""
    parsed = ids.parse(ids.Prefix.WEBHOOK_ENDPOINT, webhook_endpoint_id)
    with parts.database.transaction() as session:
        if parsed is None or not webhooks.remove(session, caller.project_id, parsed):
            raise _unknown(webhook_endpoint_id)
    return WebhookEndpointDeleted(
        id=webhook_endpoint_id, object="webhook_endpoint.deleted", deleted=True
    )


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate_secret",
    responses=documented(400, 404, 413),
    openapi_extra=_body(RotateSecret, required=False),
)
def rotate_webhook_secret(
    webhook_endpoint_id: str,
    posted: Annotated[RotateSecret, Depends(_posted(RotateSecret, optional=True))],
    caller: Administrator,
    parts: Needs,
) -> WebhookEndpointWithSecret:
    """A new secret, shown now and never again. The old one ends at once, or signs too for 24 h."""
    with parts.database.transaction() as session:
        endpoint = _known(session, caller, webhook_endpoint_id, webhooks.lock)
        keep = posted.keep_old_secret_active_for_24_hours
        secret = webhooks.rotate(session, endpoint, keep_old=keep, now=now(session))
        return view.webhook_endpoint_with_secret(endpoint, secret)


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/test",
    responses=documented(400, 404, 413),
    openapi_extra=_body(SampleEvent),
)
async def test_webhook_endpoint(
    webhook_endpoint_id: str,
    posted: Annotated[SampleEvent, Depends(_posted(SampleEvent))],
    caller: Administrator,
    parts: Needs,
) -> WebhookEndpointTest:
    """Send a sample event, once. It names a batch that does not exist."""
    url, body, headers = await run_sync(
        _sample, parts, caller, webhook_endpoint_id, posted.event_type
    )
    try:
        # Awaited, not in a thread: an endpoint that is slow costs other requests nothing.
        status = await parts.sender.post(url, body=body, headers=headers)
    except NotAnswered as error:
        raise BadRequest(
            f"The webhook endpoint did not answer: {NOT_ANSWERED[error.why]}.",
            code="webhook_endpoint_unreachable",
        ) from error
    return WebhookEndpointTest(
        object="webhook_endpoint.test",
        webhook_endpoint_id=webhook_endpoint_id,
        event_type=posted.event_type,
        status_code=status,
        success=True,
    )


@router.get("/webhook_event_types", responses=documented())
def list_webhook_event_types(_caller: Reader) -> WebhookEventTypeList:
    """What endpoints can be told of."""
    return WebhookEventTypeList(object="list", data=list(EventType))


def _sample(
    parts: Parts, caller: Caller, shown_id: str, event: EventType
) -> tuple[str, bytes, dict[str, str]]:
    with parts.database.transaction() as session:
        endpoint = _known(session, caller, shown_id, webhooks.get)
        at = now(session)
        secrets = webhooks.secrets_of(session, endpoint.id, at)
    event_id, batch_id, message_id = (
        ids.show(prefix, ids.new_id())
        for prefix in (ids.Prefix.EVENT, ids.Prefix.BATCH, ids.Prefix.DELIVERY)
    )
    body = webhook.event_body(event_id, event, at, batch_id)
    headers = webhook.headers(message_id, body, sent_at=at, signed_with=secrets)
    return endpoint.url, body, headers


def _check_url(parts: Parts, url: str) -> None:
    try:
        wanted = target(url)
        if not parts.settings.webhook_private_addresses:
            check_public(wanted)
    except BadTarget as error:
        raise BadRequest(
            f"Invalid value for 'url': {error}.", param="url", code="invalid_value"
        ) from error


def _known(
    session: Session,
    caller: Caller,
    shown_id: str,
    find: Callable[[Session, UUID, UUID], WebhookEndpoint | None],
) -> WebhookEndpoint:
    parsed = ids.parse(ids.Prefix.WEBHOOK_ENDPOINT, shown_id)
    endpoint = None if parsed is None else find(session, caller.project_id, parsed)
    if endpoint is None:
        raise _unknown(shown_id)
    return endpoint


def _unknown(shown_id: str) -> NotFound:
    return NotFound(f"No such webhook endpoint: {shown_id[:64]}", param="webhook_endpoint_id")
