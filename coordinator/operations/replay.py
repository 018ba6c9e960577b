"""Computes a round again from stored tensors, to the same hashes.

Each state of the round is computed from the state that was committed before it. Where every round gives its own
hashes, the whole run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.given import NOTHING, Given, given
from promptfed.coordinator.aggregation.private_mean import NoiseTerms
from promptfed.coordinator.aggregation.rules import Rule
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import private_jobs, secure_jobs
from promptfed.coordinator.engine.jobs import FORGOTTEN
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import (
    NoState,
    UpdatesGone,
)
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import EventRow, PhaseRow, StateRow, SumRow
from promptfed.coordinator.store.tensor_blobs import room
from promptfed.shared.api.replay_schemas import ReplayedState
from promptfed.shared.messages import ENDED
from promptfed.shared.tensors import Arrays, state_hash


@dataclass(frozen=True)
class CommittedStep:
    """One committed state, the state before it, and the clients that it knew.

    ``given``: the counted updates. ``terms``: the terms of its noise.
    """

    origin: str
    state: StateRow
    before: StateRow | None
    roster: tuple[str, ...]
    newcomers: tuple[str, ...]
    step: int = 0
    given: Given = NOTHING
    forgotten: str | None = None
    total: SumRow | None = None
    terms: NoiseTerms | None = None


def replay(registry: Registry, federation: Federation, round: int) -> list[ReplayedState]:
    """Compute every state of a completed round again.

    Raises:
        NoState, UpdatesGone: before anything is computed.
    """
    run = federation.run
    if not (round < run.round or (round == run.round and run.state in ENDED)):
        raise NoState(
            f"round {round} is not over: {federation.name} is in round {run.round}; wait, or name an earlier one"
        )
    with registry.database.read() as session:
        steps = steps_of(session, federation, round)
    if any(step.given.gone for step in steps):
        raise _gone(federation, round)
    return [_again(registry, federation, step) for step in steps]


def _gone(federation: Federation, round: int) -> UpdatesGone:
    why = f"retention: {federation.spec.retention}; a withdrawn client's may have been deleted"
    return UpdatesGone(f"tensors of round {round} are no longer kept ({why})")


# Committed steps


def steps_of(session: Session, federation: Federation, round: int) -> list[CommittedStep]:
    """The steps that led to the states of a round. Raises UpdatesGone if a state is no longer kept."""
    rows = list(session.scalars(queries.states(federation.id).where(StateRow.round == round)))
    if not rows:
        return []
    before = queries.last_state(session, federation.id, StateRow.round <= round, StateRow.id < rows[0].id)
    newcomers, forgotten = joined_by_state(session, federation), _forgotten(session, federation)
    steps = []
    for row in rows:
        if not row.stored or (before is not None and not before.stored):
            raise _gone(federation, round)
        steps.append(_with_noise(session, federation, _step(session, federation, row, before, newcomers, forgotten)))
        before = row
    return steps


def _with_noise(session: Session, federation: Federation, step: CommittedStep) -> CommittedStep:
    """The step with the terms of its noise at level ``client``. Raises UpdatesGone if the noise key is deleted."""
    if not federation.spec.privacy.protects_clients or step.state.phase_id is None:
        return step
    phase = session.get_one(PhaseRow, step.state.phase_id)
    if phase.noise_key is None:
        raise _gone(federation, step.state.round)
    return replace(step, terms=private_jobs.terms_of(federation, phase))


def joined_by_state(session: Session, federation: Federation) -> dict[int, list[str]]:
    """The clients that joined, by the id of the state that includes them."""
    made = _made_without_phase(session, federation, ("initial", "join"), "clients-joined")
    return {id: list(data["clients"]) for id, data in made}


def _forgotten(session: Session, federation: Federation) -> dict[int, str]:
    """The client that was forgotten, by the id of the state without it."""
    made = _made_without_phase(session, federation, (FORGOTTEN,), "client-forgotten")
    return {id: str(data["client"]) for id, data in made}


def _made_without_phase(
    session: Session, federation: Federation, origins: tuple[str, ...], kind: str
) -> Iterable[tuple[int, dict[str, Any]]]:
    """Ids of the states with these origins, each with the data of its event of this ``kind``."""
    made = queries.states(federation.id).where(StateRow.origin.in_(origins), StateRow.phase_id.is_(None))
    told = select(EventRow.data).where(EventRow.federation_id == federation.id, EventRow.kind == kind)
    ids = (state.id for state in session.scalars(made))
    return zip(ids, session.scalars(told.order_by(EventRow.id)), strict=False)


def _step(
    session: Session,
    federation: Federation,
    row: StateRow,
    before: StateRow | None,
    newcomers: Mapping[int, list[str]],
    forgotten: Mapping[int, str],
) -> CommittedStep:
    roster = [name for id, names in newcomers.items() if id < row.id for name in names]
    if row.id in forgotten:
        return CommittedStep(row.origin, row, before, tuple(roster), (), forgotten=forgotten[row.id])
    if row.phase_id is None:
        return CommittedStep(row.origin, row, before, tuple(roster), tuple(newcomers[row.id]))
    phase = session.get_one(PhaseRow, row.phase_id)
    counted, total = given(session, federation, row.phase_id), session.get(SumRow, row.phase_id)
    return CommittedStep(row.origin, row, before, tuple(roster), (), phase.step, counted, total=total)


# Computation


def _again(registry: Registry, federation: Federation, step: CommittedStep) -> ReplayedState:
    before = _stored(registry, step.before) if step.before is not None else {}
    rule = global_state.rule_of(federation, before)
    replayed_hash = state_hash(computed(registry, federation, step, before, step.given.updates, rule))
    intact = step.before is None or state_hash(before) == step.before.state_hash
    intact = intact and state_hash(_stored(registry, step.state)) == step.state.state_hash
    return ReplayedState(
        origin=step.origin,
        state_hash=step.state.state_hash,
        replayed_hash=replayed_hash,
        same=intact and replayed_hash == step.state.state_hash,
    )


def computed(
    registry: Registry,
    federation: Federation,
    step: CommittedStep,
    before: Arrays,
    updates: Sequence[global_state.Counted],
    rule: Rule,
) -> Arrays:
    """Compute the state after a step from the state ``before`` it. Raises DamagedBlob."""
    context = federation.context([*step.roster, *step.newcomers])
    if step.before is None:
        return global_state.initial_state(registry.blobs, federation, context)
    if step.forgotten is not None:
        return global_state.forgotten(federation, before, step.forgotten, context)
    if step.newcomers:
        return global_state.joined(federation, before, step.roster, step.newcomers)
    phase = federation.method_phase(step.state.round, step.step)
    if step.terms is not None:
        stream = global_state.stored_updates(registry.blobs, updates)
        return private_jobs.noised(federation, before, phase, stream, step.terms, context).after
    if step.total is not None:
        total = np.frombuffer(step.total.body, dtype="<i8").astype(np.int64)
        return secure_jobs.state_after(federation, before, phase, total, step.total.weight, context)[0]
    with room(registry.blobs) as rule.room:
        stored = global_state.stored_updates(registry.blobs, updates)
        return global_state.after_phase(federation, before, phase, stored, rule, context)[0]


def _stored(registry: Registry, row: StateRow) -> Arrays:
    return registry.blobs.tensors(row.sha256)[0]
