"""What a masked vector cost its client's privacy budget"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this version. Answers that there are were made without differential privacy."""
    op.add_column("exchanges", sa.Column("metrics", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Back from it."""
    op.drop_column("exchanges", "metrics")
