"""Which tables hold webhook endpoints, their secrets and what is to be delivered?"""

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    Index,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from service.batch import ShardState
from service.db.base import Base, words
from service.webhook import EventType


class WebhookEndpoint(Base):
    """A URL that is told when batches of its project end."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (
        Index("ix_webhook_endpoints_project_id_id", "project_id", "id"),
        CheckConstraint("cardinality(event_types) > 0", name="event_types"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    url: Mapped[str]
    event_types: Mapped[list[str]]
    secret_hint: Mapped[str]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class WebhookSecret(Base):
    """What an endpoint's deliveries are signed with: the one that does not expire, and those that
    a rotation left valid for a while. Kept as it is, since a hash cannot sign."""

    __tablename__ = "webhook_secrets"
    __table_args__ = (
        Index("ix_webhook_secrets_endpoint_id", "endpoint_id"),
        Index(
            "uq_webhook_secrets_current",
            "endpoint_id",
            unique=True,
            postgresql_where=text("expires_at IS NULL"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    endpoint_id: Mapped[UUID] = mapped_column(
        ForeignKey("webhook_endpoints.id", ondelete="CASCADE")
    )
    secret: Mapped[str]
    expires_at: Mapped[datetime | None]


class Delivery(Base):
    """One event for one endpoint; claimed and fenced as shards are. `dead` was given up."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("endpoint_id", "batch_id", "event_type"),
        Index(
            "ix_webhook_deliveries_ready",
            "failures",
            "not_before",
            postgresql_where=text("state = 'ready'"),
        ),
        Index(
            "ix_webhook_deliveries_leased",
            "endpoint_id",
            postgresql_where=text("state = 'leased'"),
        ),
        Index(
            "ix_webhook_deliveries_ended_at",
            "ended_at",
            postgresql_where=text("ended_at IS NOT NULL"),
        ),
        CheckConstraint("(state = 'leased') = (lease_expires_at IS NOT NULL)", name="leased"),
        CheckConstraint("(state IN ('done', 'dead')) = (ended_at IS NOT NULL)", name="ended"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    endpoint_id: Mapped[UUID] = mapped_column(
        ForeignKey("webhook_endpoints.id", ondelete="CASCADE")
    )
    batch_id: Mapped[UUID]
    # One event may have several endpoints; all hear of the same id.
    event_id: Mapped[UUID]
    event_type: Mapped[EventType] = mapped_column(words(EventType, "event_type"))
    created_at: Mapped[datetime]
    state: Mapped[ShardState] = mapped_column(words(ShardState, "state"), default=ShardState.READY)
    attempt: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    not_before: Mapped[datetime]
    # Attempts that were not answered by 2xx, and how the last one ended: a status or a reason.
    failures: Mapped[int] = mapped_column(default=0)
    outcome: Mapped[str | None]
    ended_at: Mapped[datetime | None]
