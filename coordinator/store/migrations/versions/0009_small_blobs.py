"""Small blobs as rows"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """To this version. Blobs that are files stay files, and are read as before."""
    op.create_table(
        "blobs",
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_blobs"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Tensors hardly get smaller, and the server would try it with each of them.
        op.execute("ALTER TABLE blobs ALTER COLUMN content SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Back from it. What only rows held is lost: delete the federations first."""
    op.drop_table("blobs")
