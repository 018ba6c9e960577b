"""The round in which a task of asynchronous rounds was asked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``tasks.began``."""
    op.add_column("tasks", sa.Column("began", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True))
