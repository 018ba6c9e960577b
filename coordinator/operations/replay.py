"""Computes a round again from stored tensors: to the same hashes, or with other rules of aggregation.

Each state of the round is computed from the state that was committed before it. Where every round gives its own
hashes, the whole run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.changes import change_norm
from promptfed.coordinator.aggregation.given import NOTHING, Given, given
from promptfed.coordinator.aggregation.private_mean import NoiseTerms
from promptfed.coordinator.aggregation.rules import Judged, Rule
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import private_jobs, secure_jobs
from promptfed.coordinator.engine.jobs import FORGOTTEN
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import (
    NoState,
    NotAMean,
    NotFound,
    Refusal,
    TooFewUpdates,
    UpdatesGone,
    UpdatesMasked,
)
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import EventRow, PhaseRow, StateRow, SumRow
from promptfed.coordinator.store.tensor_blobs import room
from promptfed.shared.api.replay_schemas import ReplayedState, ReplayedUpdate
from promptfed.shared.messages import ENDED
from promptfed.shared.methods.core.checks.rule_checks import check_flame, check_krum, check_means
from promptfed.shared.methods.core.interface.base import MethodError
from promptfed.shared.spec.spec_aggregation import AggregationSpec
from promptfed.shared.spec.weighting import shares
from promptfed.shared.tensors import Arrays, state_hash


class PrivacyProtected(Refusal, status=409, title="A second release of the same updates"):
    """A second aggregate of the same updates, for which the privacy budget does not pay."""


@dataclass(frozen=True)
class WhatIf:
    """Other rules for a phase: ``aggregation`` replaces the spec's, and updates of clients ``without`` are left out."""

    aggregation: AggregationSpec | None = None
    without: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.aggregation is not None or bool(self.without)


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


@dataclass(frozen=True)
class Replayed:
    """One state that was computed again: its part of the report, and its tensors."""

    report: ReplayedState
    tensors: Arrays


def replay(registry: Registry, federation: Federation, round: int, what_if: WhatIf) -> list[Replayed]:
    """Compute every state of a completed round again; with ``what_if`` only those of its phases.

    Raises:
        NoState, NotFound, NotAMean, TooFewUpdates, UpdatesGone, UpdatesMasked, PrivacyProtected: before anything is
            computed.
    """
    if what_if and federation.spec.privacy.level == "client":
        raise PrivacyProtected(
            f"{federation.name} protects whole clients: another aggregate of the same updates is a second release, "
            "which nothing has paid for"
        )
    if what_if and federation.spec.secure_aggregation is not None:
        raise UpdatesMasked(f"{federation.name} has secure sums: what a sum would be without a part of it is not known")
    _check(federation, what_if)
    run = federation.run
    if not (round < run.round or (round == run.round and run.state in ENDED)):
        raise NoState(
            f"round {round} is not over: {federation.name} is in round {run.round}; wait, or name an earlier one"
        )
    with registry.database.read() as session:
        steps = steps_of(session, federation, round)
        if what_if:
            steps = [step for step in steps if step.given.updates]
    if any(step.given.gone - set(what_if.without) for step in steps):
        raise _gone(federation, round)
    return [_again(registry, federation, step, what_if) for step in steps]


def _check(federation: Federation, what_if: WhatIf) -> None:
    unknown = sorted(set(what_if.without) - set(federation.clients))
    if unknown:
        raise NotFound(f"{federation.name} has no client {unknown[0][:100]!r}: check its name")
    if what_if.aggregation is not None:
        try:
            check_means(federation.method, federation.spec.model_copy(update={"aggregation": what_if.aggregation}))
        except MethodError as error:
            raise NotAMean(str(error)) from None


def _gone(federation: Federation, round: int) -> UpdatesGone:
    why = f"retention: {federation.spec.retention}; a withdrawn client's may have been deleted, try without it"
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


def _again(registry: Registry, federation: Federation, step: CommittedStep, what_if: WhatIf) -> Replayed:
    before = _stored(registry, step.before) if step.before is not None else {}
    rule = global_state.rule_of(federation, before, step.state.round, step.origin, what_if.aggregation)
    updates = _weighed(federation, step.given.updates, what_if)
    made = computed(registry, federation, step, before, updates, rule)
    replayed_hash, committed = state_hash(made), _stored(registry, step.state)
    intact = step.before is None or state_hash(before) == step.before.state_hash
    intact = intact and state_hash(committed) == step.state.state_hash
    report = ReplayedState(
        origin=step.origin,
        state_hash=step.state.state_hash,
        replayed_hash=replayed_hash,
        same=intact and replayed_hash == step.state.state_hash,
        moved=_distance(before, committed),
        distance=_distance(committed, made),
        updates=[_update(client, weight, rule.judged.get(client)) for client, weight, _ in updates],
    )
    return Replayed(report, made)


def _update(client: str, weight: float, judged: Judged | None) -> ReplayedUpdate:
    if judged is None:
        return ReplayedUpdate(client=client, weight=weight, verdict="counted", influence=None, distance=None)
    return ReplayedUpdate(client=client, weight=weight, **asdict(judged))


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
        stored, rounded = global_state.stored_updates(registry.blobs, updates), step.given.rounded
        moved = global_state.updates_of(registry.blobs, federation, before, phase, stored, rounded, context)
        return global_state.after_phase(federation, before, phase, moved, rule, context)[0]


def _stored(registry: Registry, row: StateRow) -> Arrays:
    return registry.blobs.tensors(row.sha256)[0]


def _weighed(
    federation: Federation, updates: Sequence[global_state.Counted], what_if: WhatIf
) -> list[global_state.Counted]:
    if not what_if:
        return list(updates)
    spec = what_if.aggregation or federation.spec.aggregation
    kept = [update for update in updates if update[0] not in what_if.without]
    if not kept:
        raise TooFewUpdates("without these clients no update is left: leave fewer out")
    try:
        check_krum(spec, len(kept))
        check_flame(spec, len(kept))
    except MethodError as error:
        raise TooFewUpdates(str(error)) from None
    weights = shares({client: federation.clients[client].num_samples for client, _, _ in kept}, spec)
    return [(client, weights[client], sha256) for client, _, sha256 in kept]


def _distance(first: Arrays, second: Arrays) -> float:
    alike = [name for name in first if name in second and first[name].shape == second[name].shape]
    return change_norm({name: first[name] for name in alike}, second)
