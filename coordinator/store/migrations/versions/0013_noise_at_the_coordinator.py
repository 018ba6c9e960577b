"""Noise at the coordinator: its keys, the key of Poisson sampling, and rounds that a budget allows"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """To this version. Federations that there are protect no whole clients."""
    op.add_column("clients", sa.Column("protection", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("federations", sa.Column("sampling_key", TEXT, nullable=True))
    op.add_column("federations", sa.Column("budget_rounds", WHOLE, nullable=True))
    op.add_column("phases", sa.Column("expected", sa.Double(), nullable=True))
    op.add_column("phases", sa.Column("noise_key", TEXT, nullable=True))


def downgrade() -> None:
    """Back from it. Federations at level client cannot go on: finish or cancel them first."""
    op.drop_column("phases", "noise_key")
    op.drop_column("phases", "expected")
    op.drop_column("federations", "budget_rounds")
    op.drop_column("federations", "sampling_key")
    op.drop_column("clients", "protection")
