"""Which endpoints want to hear of a batch's end, and what is each to be told?"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.batch import ShardState
from service.db.models import Batch, Project
from service.db.webhook_models import Delivery, WebhookEndpoint, WebhookSecret
from service.errors import BadRequest
from service.ids import new_id
from service.webhook import TRIED_FOR, EventType, hint, new_secret

MAX_ENDPOINTS = 20
"""Of a project. With the endpoints' own limit in `worker.deliver`, all of one project's being slow
does not fill a worker."""

MAX_SECRETS = 8
"""Newest ones that sign: a header has to stay short however often a client rotates."""

OLD_SECRET_VALID_FOR = timedelta(hours=24)
DELIVERIES_KEPT_FOR = timedelta(days=7)


def create(
    session: Session,
    *,
    project_id: UUID,
    name: str,
    url: str,
    event_types: Sequence[EventType],
    now: datetime,
) -> tuple[WebhookEndpoint, str]:
    """A new endpoint and its secret. Raises BadRequest where the project has enough of them."""
    # The lock makes the count hold until commit.
    session.execute(
        select(Project.id).where(Project.id == project_id).with_for_update(key_share=True)
    )
    mine = select(func.count()).where(WebhookEndpoint.project_id == project_id)
    if session.execute(mine).scalar_one() >= MAX_ENDPOINTS:
        raise BadRequest(
            f"A project has at most {MAX_ENDPOINTS} webhook endpoints.",
            code="webhook_endpoint_limit_reached",
        )
    secret = new_secret()
    endpoint = WebhookEndpoint(
        id=new_id(),
        project_id=project_id,
        name=name,
        url=url,
        event_types=list(event_types),
        secret_hint=hint(secret),
        created_at=now,
        updated_at=now,
    )
    session.add(endpoint)
    session.flush()
    session.add(WebhookSecret(id=new_id(), endpoint_id=endpoint.id, secret=secret))
    session.flush()
    return endpoint, secret


def get(session: Session, project_id: UUID, endpoint_id: UUID) -> WebhookEndpoint | None:
    """The project's endpoint of that id."""
    return session.scalar(select(WebhookEndpoint).where(_is(project_id, endpoint_id)))


def lock(session: Session, project_id: UUID, endpoint_id: UUID) -> WebhookEndpoint | None:
    """As `get`, and until commit nobody else changes it."""
    query = select(WebhookEndpoint).where(_is(project_id, endpoint_id))
    return session.scalar(query.with_for_update(key_share=True))


def _is(project_id: UUID, endpoint_id: UUID) -> ColumnElement[bool]:
    return and_(WebhookEndpoint.id == endpoint_id, WebhookEndpoint.project_id == project_id)


def page(
    session: Session, project_id: UUID, *, after: UUID | None, limit: int
) -> list[WebhookEndpoint]:
    """At most `limit` endpoints, newest first, older than `after`."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id)
    if after is not None:
        query = query.where(WebhookEndpoint.id < after)
    return list(session.scalars(query.order_by(WebhookEndpoint.id.desc()).limit(limit)))


def remove(session: Session, project_id: UUID, endpoint_id: UUID) -> bool:
    """Delete the endpoint with what it was still to be told. False where there is none."""
    gone = session.execute(
        delete(WebhookEndpoint).where(_is(project_id, endpoint_id)).returning(WebhookEndpoint.id)
    ).scalar()
    return gone is not None


def rotate(session: Session, endpoint: WebhookEndpoint, *, keep_old: bool, now: datetime) -> str:
    """A new secret. The old one signs beside it for 24 hours, or no longer from now on."""
    mine = WebhookSecret.endpoint_id == endpoint.id
    if keep_old:
        session.execute(delete(WebhookSecret).where(mine, WebhookSecret.expires_at <= now))
        session.execute(
            update(WebhookSecret)
            .where(mine, WebhookSecret.expires_at.is_(None))
            .values(expires_at=now + OLD_SECRET_VALID_FOR)
        )
    else:
        session.execute(delete(WebhookSecret).where(mine))
    secret = new_secret()
    session.add(WebhookSecret(id=new_id(), endpoint_id=endpoint.id, secret=secret))
    endpoint.secret_hint, endpoint.updated_at = hint(secret), now
    session.flush()
    return secret


def secrets_of(session: Session, endpoint_id: UUID, now: datetime) -> list[str]:
    """The secrets that sign now, newest first."""
    return list(
        session.scalars(
            select(WebhookSecret.secret)
            .where(
                WebhookSecret.endpoint_id == endpoint_id,
                or_(WebhookSecret.expires_at.is_(None), WebhookSecret.expires_at > now),
            )
            .order_by(WebhookSecret.id.desc())
            .limit(MAX_SECRETS)
        )
    )


def announce(session: Session, batch_id: UUID, event: EventType, now: datetime) -> None:
    """A delivery for every endpoint of the batch's project that listens, in the transaction that
    ends the batch: neither can be without the other."""
    listening = session.scalars(
        select(WebhookEndpoint.id)
        .join(Batch, Batch.project_id == WebhookEndpoint.project_id)
        .where(Batch.id == batch_id, WebhookEndpoint.event_types.contains([event.value]))
        # Against being deleted before the commit, which would take the batch's end with it.
        .with_for_update(read=True, key_share=True, of=WebhookEndpoint)
    ).all()
    event_id = new_id()
    rows = [
        {
            "id": new_id(),
            "endpoint_id": endpoint_id,
            "batch_id": batch_id,
            "event_id": event_id,
            "event_type": event,
            "created_at": now,
            "state": ShardState.READY,
            "attempt": 0,
            "not_before": now,
            "failures": 0,
        }
        for endpoint_id in listening
    ]
    if rows:
        session.execute(insert(Delivery), rows)


@dataclass(frozen=True, slots=True)
class Letter:
    """A claimed delivery, with all that sending it needs."""

    delivery_id: UUID
    url: str
    secrets: Sequence[str]
    event_id: UUID
    event: EventType
    batch_id: UUID
    created_at: datetime
    sent_at: datetime
    failures: int

    def __repr__(self) -> str:
        """Without what must not be logged."""
        return f"Letter({self.delivery_id})"


def letter(session: Session, delivery_id: UUID, now: datetime) -> Letter:
    """What that delivery says, and to whom."""
    row = session.execute(
        select(Delivery, WebhookEndpoint.url)
        .join(WebhookEndpoint, WebhookEndpoint.id == Delivery.endpoint_id)
        .where(Delivery.id == delivery_id)
    ).one()
    delivery: Delivery = row[0]
    return Letter(
        delivery_id=delivery.id,
        url=row[1],
        secrets=tuple(secrets_of(session, delivery.endpoint_id, now)),
        event_id=delivery.event_id,
        event=delivery.event_type,
        batch_id=delivery.batch_id,
        created_at=delivery.created_at,
        sent_at=now,
        failures=delivery.failures,
    )


def give_up_old(session: Session, now: datetime) -> int:
    """Deliveries that were tried and whose 24 hours are over: ready → dead. Answers how many.

    The attempt that fails last does this itself; this is for one whose worker was lost.
    """
    given_up = session.execute(
        update(Delivery)
        .where(
            Delivery.state == ShardState.READY,
            Delivery.attempt > 0,
            Delivery.created_at <= now - TRIED_FOR,
        )
        .values(state=ShardState.DEAD, ended_at=now)
        .returning(Delivery.id)
    )
    return len(given_up.all())


def forget_old(session: Session, now: datetime, *, limit: int = 1_000) -> None:
    """Remove deliveries that ended some days ago."""
    old = select(Delivery.id).where(Delivery.ended_at <= now - DELIVERIES_KEPT_FOR).limit(limit)
    session.execute(delete(Delivery).where(Delivery.id.in_(old)))
