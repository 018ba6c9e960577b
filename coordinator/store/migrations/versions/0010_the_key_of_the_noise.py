"""The key of the noise"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from promptfed.coordinator.store.tables import Text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version. Federations that there are have no rule with noise, and need no key."""
    op.add_column("federations", sa.Column("noise_key", Text, nullable=True))


def downgrade() -> None:
    """Back from it."""
    op.drop_column("federations", "noise_key")
