"""The state at the end of a round."""

from __future__ import annotations

from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.problems import NoState
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import StateRow


def state_of(session: Session, federation: Federation, round: int | None) -> StateRow:
    """The last state of ``round``, or of all, whose tensors are still kept. Raises NoState."""
    if round is not None and not has_state(federation, round):
        now = federation.run.round
        raise NoState(f"round {round} is not over: {federation.name} is in round {now}; wait, or name an earlier one")
    row = last_state(session, federation, round)
    if row is None:
        raise NoState(f"{federation.name} has no state yet: start it first")
    if not row.stored:
        raise NoState(f"the state of round {round} is no longer kept (retention: {federation.spec.retention})")
    return row


def last_state(session: Session, federation: Federation, round: int | None) -> StateRow | None:
    # A round without phases keeps the state of the round before.
    until = () if round is None else (StateRow.round <= round,)
    return queries.last_state(session, federation.id, *until)


def has_state(federation: Federation, round: int) -> bool:
    """Whether all phases of ``round`` are committed."""
    run = federation.run
    phases = federation.rules.phases(run.round) if run.round > 0 else ()
    return round < run.round or (round == run.round and run.step >= len(phases))
