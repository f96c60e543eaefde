"""engine figures"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_USEFUL = "ck_batches_useful"


def upgrade() -> None:
    # Constant defaults and nulls: no table is rewritten, however many lines it holds.
    op.add_column("request_lines", sa.Column("engine_ms", sa.REAL(), nullable=True))
    op.add_column(
        "workers",
        sa.Column(
            "figures",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default="{}",
            nullable=False,
        ),
    )
    for name, kind in (
        ("computed_tokens", sa.BigInteger()),
        ("useful_tokens", sa.BigInteger()),
        ("engine_s", sa.Float()),
        ("engine_rows", sa.Integer()),
        ("engine_steps", sa.Float()),
    ):
        op.add_column("batches", sa.Column(name, kind, server_default="0", nullable=False))
    for name in ("p50_ms", "p95_ms"):
        op.add_column("batches", sa.Column(name, sa.Float(), nullable=True))
    op.create_check_constraint(op.f(_USEFUL), "batches", "useful_tokens <= computed_tokens")


def downgrade() -> None:
    op.drop_constraint(op.f(_USEFUL), "batches", type_="check")
    for name in (
        "p95_ms",
        "p50_ms",
        "engine_steps",
        "engine_rows",
        "engine_s",
        "useful_tokens",
        "computed_tokens",
    ):
        op.drop_column("batches", name)
    op.drop_column("workers", "figures")
    op.drop_column("request_lines", "engine_ms")
