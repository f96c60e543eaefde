"""Which tables hold uploads in parts and idempotency keys?"""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, words
from service.upload import UploadStatus


class Upload(Base):
    """A large file that is put up in parts, and becomes a file when it is completed."""

    __tablename__ = "uploads"
    __table_args__ = (
        Index("ix_uploads_pending", "expires_at", postgresql_where=text("status = 'pending'")),
        Index(
            "ix_uploads_to_remove",
            "id",
            postgresql_where=text("ended_at IS NOT NULL AND removed_at IS NULL"),
        ),
        Index("ix_uploads_removed", "removed_at", postgresql_where=text("removed_at IS NOT NULL")),
        CheckConstraint("bytes > 0", name="bytes"),
        CheckConstraint("(status = 'pending') = (ended_at IS NULL)", name="ended"),
        CheckConstraint(
            "(status = 'completed') = (file_id IS NOT NULL AND part_ids IS NOT NULL)",
            name="completed",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    purpose: Mapped[str]
    filename: Mapped[str]
    mime_type: Mapped[str]
    # What the client says the file will have; the parts it completes with must come to it.
    bytes: Mapped[int] = mapped_column(BigInteger)
    # Of the file, counted from when it is made.
    expires_after_s: Mapped[int | None]
    status: Mapped[UploadStatus] = mapped_column(
        words(UploadStatus, "status"), default=UploadStatus.PENDING
    )
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    received_parts: Mapped[int] = mapped_column(default=0)
    received_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    # What it was completed with, so that a repeated complete is known as the same.
    part_ids: Mapped[list[UUID] | None] = mapped_column(ARRAY(Uuid))
    file_id: Mapped[UUID | None] = mapped_column(ForeignKey("files.id", ondelete="CASCADE"))
    ended_at: Mapped[datetime | None]
    # When the parts' bytes went from the store.
    removed_at: Mapped[datetime | None]


class UploadPart(Base):
    """An object of its own, of any size, until the upload has ended."""

    __tablename__ = "upload_parts"
    __table_args__ = (CheckConstraint("bytes > 0", name="bytes"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    upload_id: Mapped[UUID] = mapped_column(
        ForeignKey("uploads.id", ondelete="CASCADE"), index=True
    )
    bytes: Mapped[int]
    created_at: Mapped[datetime]


class KeyedRoute(StrEnum):
    """A route that takes an idempotency key; a key of one says nothing at another."""

    FILES = "files"
    UPLOADS = "uploads"
    BATCHES = "batches"


class IdempotencyKey(Base):
    """A key that a client sent with a call that succeeded, and what was answered."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (CheckConstraint("octet_length(digest) = 32", name="digest"),)

    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    route: Mapped[KeyedRoute] = mapped_column(words(KeyedRoute, "route"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    # SHA-256 of the call's fields and file bytes.
    digest: Mapped[bytes]
    # The JSON of the reply, sent again as it is.
    reply: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
