"""What a site's owner has shared of a check of the images."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``clients.data_check``."""
    op.add_column("clients", sa.Column("data_check", sa.JSON(none_as_null=True), nullable=True))
