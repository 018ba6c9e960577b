"""What updates and masked vectors have cost gets a column of its own, apart from the numbers that clients send."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True)
OURS = "privacy_"  # before the names of what the coordinator wrote among a client's numbers


def upgrade() -> None:
    """Only federations that protect records have had costs; in others such names were a client's own."""
    op.add_column("updates", sa.Column("spent", JSON, nullable=True))
    op.execute("ALTER TABLE exchanges RENAME COLUMN metrics TO spent")
    tasks, federations = (
        sa.table("tasks", *map(sa.column, ("id", "federation_id"))),
        sa.table("federations", sa.column("id"), sa.column("spec", JSON)),
    )
    for name, column in (("updates", "metrics"), ("exchanges", "spent")):
        table = sa.table(name, sa.column("task_id"), sa.column("metrics", JSON), sa.column("spent", JSON))
        text = sa.cast(table.c[column], sa.Text)
        joined = sa.select(table.c.task_id, text, sa.cast(federations.c.spec, sa.Text)).where(
            tasks.c.id == table.c.task_id, federations.c.id == tasks.c.federation_id, text.like(f'%"{OURS}%')
        )
        for task_id, numbers, spec in op.get_bind().execute(joined).all():
            plain, spent = _apart(numbers, spec)
            columns = {"metrics": plain, "spent": spent} if column == "metrics" else {"spent": spent}
            op.execute(table.update().where(table.c.task_id == task_id).values(columns))


def _apart(text: str, spec: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A client's numbers, and what its update has cost; None where none can be read."""
    try:
        numbers = dict(json.loads(text))
        plain = {name: value for name, value in numbers.items() if not name.startswith(OURS)}
    except (ValueError, TypeError):
        return {}, None
    try:
        if json.loads(spec)["privacy"]["level"] != "sample":
            return plain, None
        values = {name.removeprefix(OURS): value for name, value in numbers.items()}
        event = {"mechanism": "gaussian", "q": values["q"], "z": values["z"], "count": round(values["count"])}
        return plain, {
            "event": event,
            "epsilon": None,
            "epsilon_replace_one": None,
            "delta": values["delta"],
            "noise_multiplier": values["z"],
            "noise": "seeded" if values["seeded"] else "secret",
            "ledger_epsilon": values["epsilon"],
            "ledger_epsilon_replace_one": values.get("replace_one"),
        }
    except (ValueError, TypeError, LookupError, OverflowError):
        return plain, None
