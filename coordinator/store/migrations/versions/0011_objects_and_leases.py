"""Large blobs in an object store; several coordinators, and who holds which federation"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """To this version."""
    op.create_table(
        "objects",
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_objects"),
        sa.UniqueConstraint("key", name="uq_objects_key"),
    )
    op.create_table(
        "coordinators",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("url", TEXT, nullable=False),
        sa.Column("seen", sa.Double(), nullable=False),
        sa.Column("backend", WHOLE, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_coordinators"),
    )
    op.create_table(
        "leases",
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("holder", TEXT, nullable=True),
        sa.Column("epoch", WHOLE, nullable=False),
        sa.ForeignKeyConstraint(
            ["federation_id"],
            ["federations.id"],
            name="fk_leases_federation_id_federations",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("federation_id", name="pk_leases"),
    )
    op.create_index("ix_leases_holder", "leases", ["holder"])


def downgrade() -> None:
    """Back from it. What only an object store held is lost: delete the federations first."""
    op.drop_table("leases")
    op.drop_table("coordinators")
    op.drop_table("objects")
