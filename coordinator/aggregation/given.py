"""A phase's counted updates with everything that its aggregate needs to know of them, read at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.global_state import Counted
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.tables import TaskRow, UpdateRow

_COLUMNS = (TaskRow.client, TaskRow.weight, TaskRow.payload_sha256, UpdateRow.sha256, UpdateRow.stored)
_COUNTED = (
    select(*_COLUMNS)
    .join(UpdateRow, UpdateRow.task_id == TaskRow.id)
    .where(TaskRow.phase_id == bindparam("phase"), TaskRow.counted)
)


@dataclass(frozen=True)
class Given:
    """The updates in order of client name, and by client: the digest of the payload that each started from.

    ``gone``: clients whose updates were removed, by retention or on request.
    """

    updates: tuple[Counted, ...] = ()
    payloads: Mapping[str, str] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()


NOTHING = Given()


def given(session: Session, federation: Federation, phase_id: int) -> Given:
    """The counted updates of a phase."""
    rows = session.connection().execute(_COUNTED, {"phase": phase_id}).all()
    return Given(
        tuple(sorted((row.client, row.weight or 0.0, row.sha256) for row in rows)),
        {row.client: row.payload_sha256 for row in rows},
        frozenset(row.client for row in rows if not row.stored),
    )
