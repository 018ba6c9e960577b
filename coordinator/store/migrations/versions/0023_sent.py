"""The digest of an update as it was sent, where it was compressed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``updates.sent``."""
    text = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    op.add_column("updates", sa.Column("sent", text, nullable=True))
