"""The secret of the draw"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from promptfed.coordinator.store.tables import Text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version. Federations that there are go on drawing from their spec's seed."""
    op.add_column("federations", sa.Column("draw_secret", Text, nullable=True))


def downgrade() -> None:
    """Back from it."""
    op.drop_column("federations", "draw_secret")
