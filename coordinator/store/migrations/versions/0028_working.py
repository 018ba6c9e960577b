"""One of several coordinators works and the others wait, instead of leases for each federation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Who works on the tables writes its row when it has them."""
    op.drop_table("leases", if_exists=True)
    op.drop_table("coordinators", if_exists=True)
    op.create_table(
        "working",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("backend", sa.Integer(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        if_not_exists=True,
    )
