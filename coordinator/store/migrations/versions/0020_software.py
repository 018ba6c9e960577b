"""The release of promptfed that each client runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``clients.software``."""
    op.add_column("clients", sa.Column("software", sa.JSON(), nullable=True))
