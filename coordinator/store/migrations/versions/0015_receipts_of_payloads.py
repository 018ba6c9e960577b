"""Receipts of payloads: that clients were given the same"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version. Updates that there are have no receipt."""
    op.add_column("updates", sa.Column("receipt", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Back from it. What was witnessed is lost."""
    op.drop_column("updates", "receipt")
