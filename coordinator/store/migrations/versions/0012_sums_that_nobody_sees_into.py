"""Sums that nobody sees into: who signs, what was exchanged, and what came of it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """To this version. Federations that there are have no secure sums."""
    op.add_column("clients", sa.Column("identity_key", TEXT, nullable=True))
    op.create_table(
        "exchanges",
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("bytes", WHOLE, nullable=False),
        sa.Column("received_at", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_exchanges_task_id_tasks", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name="pk_exchanges"),
    )
    op.create_table(
        "sums",
        sa.Column("phase_id", WHOLE, nullable=False),
        sa.Column("sha256", TEXT, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("count", WHOLE, nullable=False),
        sa.Column("weight", WHOLE, nullable=False),
        sa.ForeignKeyConstraint(["phase_id"], ["phases.id"], name="fk_sums_phase_id_phases", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("phase_id", name="pk_sums"),
    )


def downgrade() -> None:
    """Back from it. Rounds of secure sums that are under way are lost: finish or cancel them first."""
    op.drop_table("sums")
    op.drop_table("exchanges")
    op.drop_column("clients", "identity_key")
