"""Insights into learned prompts, computed from stored tensors on the thread for tensor work, and cached.

Each piece is a separate job, so that rounds are aggregated in between. Results on a committed state never change.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.given import Given, given
from promptfed.coordinator.aggregation.server_half import NoTorch, call
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.reports import prompt_metrics, rounds
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import DamagedBlob
from promptfed.coordinator.store.lexicon import Lexicon, read_lexicon
from promptfed.coordinator.store.tables import PhaseRow, StateRow
from promptfed.shared.api import insight_schemas as schemas
from promptfed.shared.methods.core.interface.insights import (
    ChoosesPrompts,
    GeneratesPrompts,
    LearnsContexts,
    PlacesClients,
    learned_prompts,
)
from promptfed.shared.tensors import Arrays, method_part

KEPT = 5000  # results in memory; each is a few numbers, a matrix of similarities a few thousand
MOST_ROUNDS = 200  # points of the drift; of more rounds evenly spaced ones are taken, and the last
MOST_CLIENTS = 64  # in a matrix of similarities, first in order of name
MOST_CONTEXTS = 32
NEAREST = 3
NO_LEXICON = (
    "Words need the backbone, which the coordinator does not have: run `promptfed federation words {name}` once"
)

T = TypeVar("T")


@dataclass(frozen=True)
class _CountedPhase:
    """A phase's counted updates, and the state that the clients began with."""

    phase_id: int
    phase: str
    before: str | None
    given: Given


@dataclass(frozen=True)
class _Plan:
    """Inputs for the insights of a round. ``history``: digest of each round's last state, None if not kept."""

    state: rounds.StoredState
    history: dict[int, str | None]
    exchanges: tuple[_CountedPhase, ...]


class Insights:
    """Computes and caches insights. Methods run on the event loop; computations do not."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._turn = asyncio.Lock()

    async def of(self, federation: Federation, round: int | None) -> schemas.InsightsView:
        """All insights into the state after ``round`` (None: the latest) and the rounds before. Raises NoState."""
        plan = await asyncio.to_thread(_plan, self._registry, federation, round)
        missing: list[schemas.Missing] = []
        drift = await self._drift(federation, plan, missing)
        similarity = await self._similarity(federation, plan, missing)
        if federation.lexicon is None and isinstance(federation.method, LearnsContexts):
            missing.append(schemas.Missing(what="words", why=NO_LEXICON.format(name=federation.name)))
        roster = tuple(name for name, member in federation.run.members.items() if member.joined)
        key = ("words", federation.id, plan.state.sha256, federation.lexicon, roster)
        words, plane = await self._once(key, lambda: _words_and_plane(self._registry, federation, plan.state))
        return schemas.InsightsView(
            round=plan.state.round,
            state_hash=plan.state.state_hash,
            drift=drift,
            similarity=similarity,
            words=words,
            plane=plane,
            missing=missing,
        )

    async def _drift(
        self, federation: Federation, plan: _Plan, missing: list[schemas.Missing]
    ) -> list[schemas.DriftPoint]:
        first = plan.history.get(0)
        gone = [round for round, digest in plan.history.items() if digest is None]
        if gone:
            retention = federation.spec.retention
            why = f"The states of rounds {gone[0]} to {gone[-1]} are no longer kept (retention: {retention})"
            missing.append(schemas.Missing(what="drift", why=why))
        if first is None:
            return []
        points, before = [], first
        for round, digest in plan.history.items():
            if digest is not None:
                job = partial(_drift, self._registry, federation, first, before, digest)
                key = ("drift", federation.id, first, before, digest)
                points.append(schemas.DriftPoint(round=round, tensors=await self._once(key, job)))
                before = digest
        return points

    async def _similarity(
        self, federation: Federation, plan: _Plan, missing: list[schemas.Missing]
    ) -> list[schemas.Similarity]:
        similarities = []
        if federation.spec.secure_aggregation is not None:
            why = "Only the sum of the updates is known (secure aggregation), so their agreement is unknown"
            missing.append(schemas.Missing(what="similarity", why=why))
        for exchange in plan.exchanges:
            try:
                job = partial(_cosines, self._registry, federation, exchange)
                rows = await self._once(("cosines", exchange.phase_id), job)
            except FileNotFoundError:
                retention = federation.spec.retention
                why = f"The updates of round {plan.state.round} are no longer kept (retention: {retention})"
                missing.append(schemas.Missing(what="similarity", why=why))
                continue
            except DamagedBlob as error:
                self._registry.report_damage(federation.id, error)
                why = f"What is stored of round {plan.state.round} is damaged: {error}"
                missing.append(schemas.Missing(what="similarity", why=why))
                continue
            clients = [client for client, _, _ in exchange.given.updates]
            omitted = max(0, len(clients) - MOST_CLIENTS)
            similarities.append(
                schemas.Similarity(phase=exchange.phase, clients=clients[:MOST_CLIENTS], omitted=omitted, cosines=rows)
            )
        return similarities

    async def _once(self, key: Hashable, job: Callable[[], T]) -> T:
        """The cached result of ``job``, which is computed on the thread for tensor work if necessary."""
        async with self._turn:
            if key not in self._kept:
                self._kept[key] = await self._registry.compute(job)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return cast(T, self._kept[key])


# Inputs


def _plan(registry: Registry, federation: Federation, round: int | None) -> _Plan:
    with registry.database.read() as session:
        stored = rounds.state_of(session, federation, round)
        columns = (StateRow.round, StateRow.sha256, StateRow.stored)
        mine = (StateRow.federation_id == federation.id, StateRow.round <= stored.round)
        rows = session.execute(select(*columns).where(*mine).order_by(StateRow.id))
        history = {row.round: row.sha256 if row.stored else None for row in rows}
        history |= {stored.round: stored.sha256}  # of a round under way, its phases' states are no round's
        return _Plan(stored, _spaced(history), tuple(_exchanges(session, federation, stored.round)))


def _spaced(history: dict[int, str | None]) -> dict[int, str | None]:
    """At most ``MOST_ROUNDS`` of the rounds: the last one, and every second, fourth, eighth, ... one.

    When a round is added, most points stay, whose drift is known.
    """
    rounds, stride = list(history), 1
    chosen = set(rounds)
    while len(chosen) > MOST_ROUNDS:
        stride *= 2
        chosen = {*rounds[::stride], rounds[-1]}
    return {round: digest for round, digest in history.items() if round in chosen}


def _exchanges(session: Session, federation: Federation, round: int) -> list[_CountedPhase]:
    mine = (PhaseRow.federation_id == federation.id, PhaseRow.round == round, PhaseRow.kind == "train")
    phases = session.scalars(select(PhaseRow).where(*mine, PhaseRow.completed_at.is_not(None)).order_by(PhaseRow.step))
    exchanges = []
    for phase in phases:
        after = session.scalars(select(StateRow).where(StateRow.phase_id == phase.id)).one_or_none()
        if after is None:
            continue
        before = queries.last_state(session, federation.id, StateRow.round <= round, StateRow.id < after.id)
        counted = given(session, federation, phase.id)
        kept = before is not None and before.stored and not counted.gone
        digest = before.sha256 if before is not None and kept else None
        exchanges.append(_CountedPhase(phase.id, phase.name, digest, counted))
    return exchanges


# Computation


def _drift(
    registry: Registry, federation: Federation, first: str, before: str, digest: str
) -> dict[str, schemas.TensorDrift]:
    start, earlier, now = (_learned(federation, _state(registry, state)) for state in (first, before, digest))
    return prompt_metrics.drift(start, now, earlier)


def _learned(federation: Federation, state: Arrays) -> Arrays:
    if isinstance(federation.method, ChoosesPrompts):
        return _where_possible(federation, "prompts", state)
    return cast(Arrays, learned_prompts(federation.method, cast(Any, state)))


def _cosines(registry: Registry, federation: Federation, exchange: _CountedPhase) -> list[list[float | None]]:
    if exchange.before is None:
        raise FileNotFoundError
    shown, rounded = exchange.given.updates[:MOST_CLIENTS], exchange.given.rounded
    state = lru_cache(maxsize=8)(partial(_state, registry))
    starts = [state(rounded.get(client, exchange.before)) for client, _, _ in shown]
    return prompt_metrics.cosines(registry.blobs.places([sha256 for _, _, sha256 in shown]), starts)


def _words_and_plane(
    registry: Registry, federation: Federation, stored: rounds.StoredState
) -> tuple[schemas.WordsView | None, schemas.PlaneView | None]:
    known = read_lexicon(registry.blobs, federation.lexicon) if federation.lexicon is not None else None
    features = known.class_features if known is not None else {}
    method, given = federation.method, (_state(registry, stored.sha256), federation.context(), features)
    words = None
    if known is not None and isinstance(method, LearnsContexts):
        contexts = _where_possible(federation, "contexts", *given)
        words = _words(known, contexts) if contexts else None
    vectors = _where_possible(federation, "client_vectors", *given) if isinstance(method, PlacesClients) else {}
    projected = prompt_metrics.plane(vectors)
    if projected is None:
        return words, None
    points = [schemas.PlanePoint(client=client, x=x, y=y) for client, (x, y) in projected.points.items()]
    kind: Literal["contexts", "descriptors"] = "contexts" if isinstance(method, GeneratesPrompts) else "descriptors"
    return words, schemas.PlaneView(of=kind, explained=list(projected.explained), points=points)


def _where_possible(federation: Federation, name: str, *arguments: Any) -> Arrays:
    """The result of a server function; nothing if it cannot be computed here."""
    try:
        made: Arrays = call(federation, name, *arguments)
    except NoTorch:
        return {}
    return made


def _words(known: Lexicon, contexts: Arrays) -> schemas.WordsView:
    views = []
    for label, vectors in list(contexts.items())[:MOST_CONTEXTS]:
        rows = prompt_metrics.nearest(vectors, known.embeddings, NEAREST)
        near = [[schemas.NearestWord(word=known.words[at], distance=distance) for at, distance in row] for row in rows]
        views.append(schemas.ContextWords(label=label, vectors=near))
    return schemas.WordsView(spacing=prompt_metrics.spacing(known.embeddings), contexts=views)


def _state(registry: Registry, digest: str) -> Arrays:
    return method_part(registry.blobs.tensors(digest)[0])
