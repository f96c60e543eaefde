"""retries, pauses and deleted batches"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

STAGES = "name IN ('validate', 'plan', 'assemble', 'clean', 'remove')"
STAGES_BEFORE = "name IN ('validate', 'plan', 'assemble', 'clean')"


def upgrade() -> None:
    for link in ("retry_of", "retried_by"):
        op.add_column("batches", sa.Column(link, sa.Uuid(), nullable=True))
        op.create_foreign_key(op.f(f"fk_batches_{link}"), "batches", "batches", [link], ["id"])
    for stamp in ("paused_at", "deleted_at"):
        op.add_column("batches", sa.Column(stamp, sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(
        op.f("ck_batches_deleted_when_ended"),
        "batches",
        "deleted_at IS NULL OR status IN ('completed', 'failed', 'expired', 'cancelled')",
    )
    op.drop_constraint(op.f("ck_stages_name"), "stages")
    op.create_check_constraint(op.f("ck_stages_name"), "stages", STAGES)


def downgrade() -> None:
    # What is deleted would come back as a batch without lines.
    op.execute("DELETE FROM stages WHERE name = 'remove'")
    op.execute("UPDATE batches SET retried_by = NULL, retry_of = NULL")
    op.execute("DELETE FROM batches WHERE deleted_at IS NOT NULL")
    op.drop_constraint(op.f("ck_stages_name"), "stages")
    op.create_check_constraint(op.f("ck_stages_name"), "stages", STAGES_BEFORE)
    op.drop_constraint(op.f("ck_batches_deleted_when_ended"), "batches")
    for column in ("deleted_at", "paused_at", "retried_by", "retry_of"):
        op.drop_column("batches", column)
