"""The choice of clients in the database: what it knows of them, and the reasons that were given."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.choice import told_by
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.run_state import Told
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import EventRow, PhaseRow, TaskRow, UpdateRow
from promptfed.shared.spec.participation import BY_LOSS, ParticipationSpec


def chosen_before(session: Session, id: str, part: ParticipationSpec) -> tuple[dict[str, int], dict[str, Told]]:
    """`Run.asked` and `Run.told` of the federation ``id``, as its stored tasks and updates say."""
    first = (PhaseRow.kind == "train", PhaseRow.step == 0)
    tasks = queries.tasks_with_phases(id).where(*first).group_by(TaskRow.client)
    rows = session.execute(tasks.with_only_columns(TaskRow.client, func.max(PhaseRow.round).label("round")))
    asked = {row.client: row.round for row in rows}
    told: dict[str, Told] = {}
    if part.choice not in BY_LOSS:
        return asked, told
    updates = queries.tasks_with_phases(id).join(UpdateRow, UpdateRow.task_id == TaskRow.id)
    columns = (TaskRow.client, PhaseRow.round, UpdateRow.metrics, TaskRow.opened_at, UpdateRow.received_at)
    ordered = updates.with_only_columns(*columns).order_by(PhaseRow.round, PhaseRow.step, TaskRow.number)
    for client, round, metrics, opened, received in session.execute(ordered):
        said = told_by(metrics, round, clock.seconds_between(opened, received))
        if said is not None:
            told[client] = said
    return asked, told


def reasons(session: Session, federation: Federation, round: int, phase: str) -> dict[str, str]:
    """Why each client was chosen for a phase; empty where they are drawn alike."""
    if federation.rules.choice is None:
        return {}
    mine = (EventRow.federation_id == federation.id, EventRow.kind.in_(("phase-opened", "clients-asked")))
    here = (EventRow.data["round"].as_integer() == round, EventRow.data["phase"].as_string() == phase)
    given: dict[str, str] = {}
    for data in session.scalars(select(EventRow.data).where(*mine, *here).order_by(EventRow.id)):
        given |= data.get("reasons", {})
    return given
