"""How does the whole service fare? For Prometheus, not for clients: no project and no key in it.

A key belongs to a project, and these figures to nobody's: a token of the operator's own lets them
be read, or, where none is set, only this machine may.
"""

import hmac
from ipaddress import ip_address

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from service.api.deps import Needs, Parts
from service.api.errors import documented
from service.db import counts, session, workers
from service.errors import Forbidden, Unauthenticated
from service.metrics import Known, exposition
from service.settings import Settings

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers by which a proxy says that it asks for somebody else, who may be anywhere."""

router = APIRouter(tags=["Metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus's text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **{status: reply for status, reply in documented().items() if status != 429},
    },
)
def metrics(request: Request, parts: Needs) -> Response:
    """Every worker's engines, and the work there is, as of the last heartbeats."""
    _check(request, parts.settings)
    return Response(exposition(_known(parts)), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _check(request: Request, settings: Settings) -> None:
    """Raises 401 without the token; 403 where none is set and the caller is elsewhere."""
    token = settings.metrics_token
    if token is None:
        if not _is_local(request):
            raise Forbidden(
                "Metrics are shown to this machine alone; with HALFRATE_METRICS_TOKEN set, to"
                " whoever sends it as a bearer token."
            )
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # As they went over the wire, whatever they spell.
    sent, expected = given.strip().encode("latin-1"), token.get_secret_value().encode()
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent, expected):
        raise Unauthenticated("Metrics need the bearer token of HALFRATE_METRICS_TOKEN.")


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    try:
        return ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _known(parts: Parts) -> Known:
    with parts.database.transaction() as transaction:
        return Known(
            workers=workers.living(transaction),
            batches=counts.batches_by_status(transaction),
            lines=counts.lines_of_open_batches(transaction),
            queues=counts.queues(transaction, session.now(transaction)),
        )
