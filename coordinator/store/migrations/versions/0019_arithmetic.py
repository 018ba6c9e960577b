"""The version of the arithmetic of each federation; those of before were computed with torch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the column."""
    op.add_column("federations", sa.Column("arithmetic", WHOLE, nullable=False, server_default="1"))
