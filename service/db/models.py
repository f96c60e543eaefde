"""Which tables hold projects, files, batches and their lines, and what do they guarantee?"""

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    Numeric,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from service.batch import BatchStatus, LineState, ShardState, StageName
from service.db.base import Base, words


class Right(StrEnum):
    """What an API key may do; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


class Project(Base):
    """A tenant: everything is scoped to one."""

    __tablename__ = "projects"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class ApiKey(Base):
    """A bearer key, by its SHA-256 only."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("rights IN ('read', 'submit', 'admin')", name="rights"),
        CheckConstraint("octet_length(hash) = 32", name="hash"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str]
    hash: Mapped[bytes] = mapped_column(unique=True)
    hint: Mapped[str]
    rights: Mapped[Right] = mapped_column(Text)
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class File(Base):
    """An uploaded or produced object. `deleted_at` takes it from the API; its bytes may outlive it
    while a batch still reads them."""

    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_project_id_id", "project_id", "id"),
        Index("ix_files_expires_at", "expires_at", postgresql_where=text("deleted_at IS NULL")),
        Index(
            "ix_files_to_remove",
            "id",
            postgresql_where=text("deleted_at IS NOT NULL AND removed_at IS NULL"),
        ),
        CheckConstraint("bytes >= 0", name="bytes"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    purpose: Mapped[str]
    filename: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    storage_key: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    # When the bytes went from the store; the sweep does that, some seconds after `deleted_at`.
    removed_at: Mapped[datetime | None]


class Batch(Base):
    """One POST /v1/batches. Counts and sums are kept in the transactions that record lines."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_project_id_id", "project_id", "id"),
        Index(
            "ix_batches_open_expires_at",
            "expires_at",
            postgresql_where=text(
                "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
            ),
        ),
        CheckConstraint("completed + failed <= total", name="counts"),
        CheckConstraint("least(total, completed, failed) >= 0", name="counts_positive"),
        CheckConstraint("useful_tokens <= computed_tokens", name="useful"),
        CheckConstraint("(status = 'completed') = (completed_at IS NOT NULL)", name="completed"),
        CheckConstraint("(status = 'failed') = (failed_at IS NOT NULL)", name="failed"),
        CheckConstraint("(status = 'expired') = (expired_at IS NOT NULL)", name="expired"),
        CheckConstraint("(status = 'cancelled') = (cancelled_at IS NOT NULL)", name="cancelled"),
        CheckConstraint(
            "(output_file_id IS NULL AND error_file_id IS NULL)"
            " OR status IN ('completed', 'expired', 'cancelled')",
            name="files_when_ended",
        ),
        CheckConstraint(
            "deleted_at IS NULL OR status IN ('completed', 'failed', 'expired', 'cancelled')",
            name="deleted_when_ended",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    endpoint: Mapped[str]
    input_file_id: Mapped[UUID] = mapped_column(ForeignKey("files.id"), index=True)
    completion_window: Mapped[str]
    # Names and values, which JSONB cannot hold where they contain U+0000: the wire refuses those.
    metadata_: Mapped[dict[str, str] | None] = mapped_column("metadata")
    output_expires_after_s: Mapped[int | None]
    status: Mapped[BatchStatus] = mapped_column(words(BatchStatus, "status"))
    # The one model of the batch; null before it is known and where lines name several.
    model: Mapped[str | None]
    created_at: Mapped[datetime]
    in_progress_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]
    finalizing_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    # Set when expiry or cancelling froze the unfinished lines; from then on the counts stand.
    frozen_at: Mapped[datetime | None]
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    input_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    standard_cost: Mapped[Decimal] = mapped_column(Numeric(24, 12), default=Decimal(0))
    paid_cost: Mapped[Decimal] = mapped_column(Numeric(24, 12), default=Decimal(0))
    # What the answered lines cost the engine (`service.db.lines.Effort`).
    computed_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    useful_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    engine_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    engine_rows: Mapped[int] = mapped_column(default=0, server_default="0")
    engine_steps: Mapped[float] = mapped_column(default=0.0, server_default="0")
    first_token_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    later_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    later_tokens_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    preempted: Mapped[int] = mapped_column(default=0, server_default="0")
    # Of a line's engine_ms; known once the batch has ended.
    p50_ms: Mapped[float | None]
    p95_ms: Mapped[float | None]
    # The first `max_errors` validation errors, and how many there were.
    errors: Mapped[list[dict[str, Any]] | None]
    error_count: Mapped[int] = mapped_column(default=0)
    output_file_id: Mapped[UUID | None] = mapped_column(ForeignKey("files.id"))
    error_file_id: Mapped[UUID | None] = mapped_column(ForeignKey("files.id"))
    # Whose unfinished lines these are, and the batch that took over the unfinished ones of this.
    retry_of: Mapped[UUID | None] = mapped_column(ForeignKey("batches.id"))
    retried_by: Mapped[UUID | None] = mapped_column(ForeignKey("batches.id"))
    # Since when no shard may be claimed; of an ended batch it says nothing.
    paused_at: Mapped[datetime | None]
    # Takes it from the API. The row stays: ledger and links name it; its lines and texts go.
    deleted_at: Mapped[datetime | None]


class Stage(Base):
    """A step that a CPU worker does for a batch; claimed and fenced exactly as shards are."""

    __tablename__ = "stages"
    __table_args__ = (
        UniqueConstraint("batch_id", "name"),
        Index("ix_stages_ready", "not_before", postgresql_where=text("state = 'ready'")),
        Index("ix_stages_leased", "lease_expires_at", postgresql_where=text("state = 'leased'")),
        CheckConstraint("(state = 'leased') = (lease_expires_at IS NOT NULL)", name="leased"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    batch_id: Mapped[UUID] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"))
    name: Mapped[StageName] = mapped_column(words(StageName, "name"))
    state: Mapped[ShardState] = mapped_column(words(ShardState, "state"), default=ShardState.READY)
    attempt: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    not_before: Mapped[datetime]
    failures: Mapped[int] = mapped_column(default=0)


class Shard(Base):
    """A planned slice of lines of one model; its lines never change."""

    __tablename__ = "shards"
    __table_args__ = (
        UniqueConstraint("batch_id", "ordinal"),
        Index("ix_shards_ready", "model", "not_before", postgresql_where=text("state = 'ready'")),
        Index("ix_shards_leased", "lease_expires_at", postgresql_where=text("state = 'leased'")),
        CheckConstraint("(state = 'leased') = (lease_expires_at IS NOT NULL)", name="leased"),
        CheckConstraint("cardinality(lines) > 0", name="lines"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    batch_id: Mapped[UUID] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"))
    # Plan order within the batch; retry shards follow the planned ones.
    ordinal: Mapped[int]
    model: Mapped[str]
    lines: Mapped[list[int]]
    # Estimated tokens of work: prompt and expected output.
    cost: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[ShardState] = mapped_column(words(ShardState, "state"), default=ShardState.READY)
    attempt: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    not_before: Mapped[datetime]
    # Claims that ended in an exception of ours, and claims whose worker was lost.
    failures: Mapped[int] = mapped_column(default=0)
    deaths: Mapped[int] = mapped_column(default=0)
    # Whether the claim has been let at the engine: a suspect that still waits to have it to itself
    # did not cause what happens there meanwhile.
    begun: Mapped[bool] = mapped_column(default=False, server_default="false")


class Part(Base):
    """The object that one attempt flushed. Unique by (shard, attempt, sequence), so that a commit
    whose outcome is unknown can be repeated."""

    __tablename__ = "parts"
    __table_args__ = (
        UniqueConstraint("shard_id", "attempt", "sequence"),
        Index("ix_parts_batch_id", "batch_id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    batch_id: Mapped[UUID] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"))
    shard_id: Mapped[UUID] = mapped_column(ForeignKey("shards.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    sequence: Mapped[int]
    storage_key: Mapped[str] = mapped_column(unique=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    lines: Mapped[int]
    created_at: Mapped[datetime]


class RequestLine(Base):
    """One line of an accepted input file."""

    __tablename__ = "request_lines"
    # A line is rewritten once, a million at a time: leave room on the page for it, and vacuum
    # before a tenth of a large table is dead.
    __table_args__ = (
        CheckConstraint(
            "(state IN ('succeeded', 'failed')) = (part_id IS NOT NULL)", name="answered"
        ),
        {
            "postgresql_with": {
                "fillfactor": "80",
                "autovacuum_vacuum_scale_factor": "0.02",
                "autovacuum_vacuum_insert_scale_factor": "0.1",
            }
        },
    )

    batch_id: Mapped[UUID] = mapped_column(
        ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True
    )
    # 1-based and physical: blank lines count.
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    custom_id: Mapped[str]
    # Where the line stands in the input object, in bytes, without its line end.
    byte_offset: Mapped[int] = mapped_column(BigInteger)
    byte_length: Mapped[int]
    state: Mapped[LineState] = mapped_column(
        words(LineState, "state"), default=LineState.PENDING, server_default="pending"
    )
    attempts: Mapped[int] = mapped_column(SmallInteger, default=0, server_default="0")
    next_try_at: Mapped[datetime | None]
    status_code: Mapped[int | None] = mapped_column(SmallInteger)
    error_code: Mapped[str | None]
    input_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    output_tokens: Mapped[int | None]
    # Its share of the engine's time; null unless it succeeded. A fraction: on a GPU most lines take
    # less than a millisecond.
    engine_ms: Mapped[float | None] = mapped_column(REAL)
    # Where the response line stands, once there is one.
    part_id: Mapped[UUID | None]
    part_offset: Mapped[int | None] = mapped_column(BigInteger)
    part_length: Mapped[int | None]


class Worker(Base):
    """An engine worker process that is alive, by its heartbeat."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(primary_key=True)
    models: Mapped[list[str]]
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    # By model id, what `service.db.workers.Figures` holds, as of the heartbeat.
    figures: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")


class ModelSpeed(Base):
    """What engine workers measured of a model; plans are cut by it."""

    __tablename__ = "model_speeds"

    model: Mapped[str] = mapped_column(primary_key=True)
    tokens_per_s: Mapped[float]
    measured_at: Mapped[datetime]


class UsageEntry(Base):
    """Append-only: what one part's lines used and cost, written with the lines themselves."""

    __tablename__ = "usage_ledger"
    __table_args__ = (
        Index("ix_usage_ledger_project_id_created_at", "project_id", "created_at"),
        CheckConstraint("least(input_tokens, cached_tokens, output_tokens) >= 0", name="tokens"),
    )

    # The part's own id: one entry a part, however often its commit is repeated.
    part_id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    batch_id: Mapped[UUID]
    model: Mapped[str]
    input_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    standard_cost: Mapped[Decimal] = mapped_column(Numeric(24, 12))
    paid_cost: Mapped[Decimal] = mapped_column(Numeric(24, 12))
    created_at: Mapped[datetime]
