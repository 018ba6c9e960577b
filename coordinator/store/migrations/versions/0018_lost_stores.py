"""A coordinator of several tells the others what it has lost."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``coordinators.lost``."""
    text = String().with_variant(String(collation="C"), "postgresql")
    op.add_column("coordinators", Column("lost", text, nullable=True))
