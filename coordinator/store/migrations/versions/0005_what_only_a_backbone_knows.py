"""What only a backbone knows"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    """To this version."""
    op.add_column("federations", sa.Column("lexicon", TEXT, nullable=True))


def downgrade() -> None:
    """Back from it."""
    op.drop_column("federations", "lexicon")
