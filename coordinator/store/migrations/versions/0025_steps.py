"""The number of optimizer steps of an update, where the spec's ``training.budget`` asks for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``updates.steps``."""
    op.add_column("updates", sa.Column("steps", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True))
