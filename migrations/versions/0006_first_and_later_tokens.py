"""first and later tokens"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    # Constant defaults: no row is rewritten.
    for name, kind in (
        ("first_token_s", sa.Float()),
        ("later_tokens", sa.BigInteger()),
        ("later_tokens_s", sa.Float()),
        ("preempted", sa.Integer()),
    ):
        op.add_column("batches", sa.Column(name, kind, server_default="0", nullable=False))


def downgrade() -> None:
    for name in ("preempted", "later_tokens_s", "later_tokens", "first_token_s"):
        op.drop_column("batches", name)
