"""Operators, and what they did"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from promptfed.coordinator.store.tables import Json, Text, Whole

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version."""
    op.create_table(
        "operator_tokens",
        sa.Column("digest", Text, nullable=False),
        sa.Column("id", Text, nullable=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("role", Text, nullable=False),
        sa.Column("created_at", Text, nullable=False),
        sa.Column("expires_at", Text, nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_operator_tokens")),
        sa.UniqueConstraint("id", name=op.f("uq_operator_tokens_id")),
    )
    op.create_index(op.f("ix_operator_tokens_name"), "operator_tokens", ["name"])
    op.create_table(
        "audit_log",
        sa.Column("number", Whole, autoincrement=False, nullable=False),
        sa.Column("at", Text, nullable=False),
        sa.Column("actor", Text, nullable=False),
        sa.Column("role", Text, nullable=False),
        sa.Column("address", Text, nullable=False),
        sa.Column("act", Text, nullable=False),
        sa.Column("federation", Text, nullable=True),
        sa.Column("federation_name", Text, nullable=True),
        sa.Column("detail", Json, nullable=False),
        sa.Column("previous", Text, nullable=False),
        sa.Column("hash", Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_federation"), "audit_log", ["federation"])


def downgrade() -> None:
    """Back from it."""
    op.drop_index(op.f("ix_audit_log_federation"), "audit_log")
    op.drop_table("audit_log")
    op.drop_index(op.f("ix_operator_tokens_name"), "operator_tokens")
    op.drop_table("operator_tokens")
