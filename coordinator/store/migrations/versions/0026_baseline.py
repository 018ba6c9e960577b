"""The tables of release 0.4.0, from which later migrations start."""

from __future__ import annotations

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: ``Database.migrate`` creates new tables in their newest form, without migrations."""
