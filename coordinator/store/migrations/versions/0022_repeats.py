"""How a federation has gone back to forget clients, and from which round on others join again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add ``federations.repeats`` and ``clients.joins_from``."""
    whole = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("federations", sa.Column("repeats", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("clients", sa.Column("joins_from", whole, nullable=False, server_default="0"))
