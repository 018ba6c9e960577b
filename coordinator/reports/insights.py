"""What only prompt learning can show, computed from stored tensors on the computing thread and kept by round.

Each piece is a job of its own, so that rounds are aggregated in between; what a committed state says never changes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain.federation import Live
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.operations import vocabulary
from promptfed.coordinator.reports import prompt_metrics, rounds
from promptfed.coordinator.store.tables import PhaseRow, StateRow
from promptfed.shared.insight_schemas import (
    ContextWords,
    DriftPoint,
    InsightsView,
    Missing,
    NearestWord,
    PlanePoint,
    PlaneView,
    Similarity,
    TensorDrift,
    WordsView,
)
from promptfed.shared.methods.core.insights import GeneratesPrompts, LearnsContexts, PlacesClients, learned_prompts
from promptfed.shared.tensors import Tensors, decode_file

KEPT = 5000  # results in memory; each is a few numbers, a matrix of similarities a few thousand
MOST_ROUNDS = 200  # points of the drift; of more rounds evenly spaced ones are taken
MOST_CLIENTS = 64  # in a matrix of similarities, first in order of name
MOST_CONTEXTS = 32
NEAREST = 3
NO_LEXICON = "Words need the backbone, which the coordinator has not: run `promptfed federation words {name}` once"

T = TypeVar("T")


@dataclass(frozen=True)
class _Exchange:
    """A phase's counted updates, and the state that the clients began with."""

    phase_id: int
    phase: str
    before: str | None
    updates: tuple[global_state.Counted, ...]


@dataclass(frozen=True)
class _Plan:
    """What there is to compute for a round: the last state of each round so far by digest, None where not kept."""

    found: rounds.Stored
    history: dict[int, str | None]
    exchanges: tuple[_Exchange, ...]


class Insights:
    """Computes and remembers. All methods run on the event loop; none computes there."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._turn = asyncio.Lock()

    async def of(self, live: Live, round: int | None) -> InsightsView:
        """Everything about the state after ``round`` (None: the latest) and the way to it. Raises NoState."""
        plan = await asyncio.to_thread(_plan, self._engine, live, round)
        missing: list[Missing] = []
        drift = await self._drift(live, plan, missing)
        similarity = await self._similarity(live, plan, missing)
        if live.lexicon is None and isinstance(live.method, LearnsContexts):
            missing.append(Missing(what="words", why=NO_LEXICON.format(name=live.name)))
        roster = tuple(name for name, member in live.run.members.items() if member.joined)
        key = ("words", live.id, plan.found.sha256, live.lexicon, roster)
        words, plane = await self._once(key, lambda: _words_and_plane(self._engine, live, plan.found))
        return InsightsView(
            round=plan.found.round,
            state_hash=plan.found.state_hash,
            drift=drift,
            similarity=similarity,
            words=words,
            plane=plane,
            missing=missing,
        )

    async def _drift(self, live: Live, plan: _Plan, missing: list[Missing]) -> list[DriftPoint]:
        first = plan.history.get(0)
        gone = [round for round, digest in plan.history.items() if digest is None]
        if gone:
            why = f"The states of rounds {gone[0]} to {gone[-1]} are no longer kept (retention: {live.spec.retention})"
            missing.append(Missing(what="drift", why=why))
        if first is None:
            return []
        points = []
        for round, digest in plan.history.items():
            if digest is not None:
                job = _drift_job(self._engine, live, first, digest)
                points.append(DriftPoint(round=round, tensors=await self._once(("drift", live.id, first, digest), job)))
        return points

    async def _similarity(self, live: Live, plan: _Plan, missing: list[Missing]) -> list[Similarity]:
        found = []
        for one in plan.exchanges:
            try:
                rows = await self._once(("cosines", one.phase_id), _cosines_job(self._engine, live, one))
            except FileNotFoundError:
                why = f"The updates of round {plan.found.round} are no longer kept (retention: {live.spec.retention})"
                missing.append(Missing(what="similarity", why=why))
                continue
            clients = [client for client, _, _ in one.updates]
            omitted = max(0, len(clients) - MOST_CLIENTS)
            found.append(Similarity(phase=one.phase, clients=clients[:MOST_CLIENTS], omitted=omitted, cosines=rows))
        return found

    async def _once(self, key: Hashable, job: Callable[[], T]) -> T:
        """What ``job`` comes to, computed where tensor work is done unless it is known."""
        async with self._turn:
            if key not in self._kept:
                self._kept[key] = await self._engine.compute(job)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return cast(T, self._kept[key])


# What there is


def _plan(engine: Engine, live: Live, round: int | None) -> _Plan:
    with engine.database.read() as session:
        found = rounds.state_of(session, live, round)
        rows = session.scalars(
            select(StateRow)
            .where(StateRow.federation_id == live.id, StateRow.round <= found.round)
            .order_by(StateRow.id)
        )
        history = {row.round: row.sha256 if row.stored else None for row in rows}
        history |= {found.round: found.sha256}  # of a round under way, its phases' states are no round's
        return _Plan(found, _spaced(history), tuple(_exchanges(session, live, found.round)))


def _spaced(history: dict[int, str | None]) -> dict[int, str | None]:
    rounds = list(history)
    if len(rounds) <= MOST_ROUNDS:
        return history
    last = len(rounds) - 1
    chosen = {rounds[place * last // (MOST_ROUNDS - 1)] for place in range(MOST_ROUNDS)}
    return {round: digest for round, digest in history.items() if round in chosen}


def _exchanges(session: Session, live: Live, round: int) -> list[_Exchange]:
    mine = (PhaseRow.federation_id == live.id, PhaseRow.round == round, PhaseRow.kind == "train")
    phases = session.scalars(select(PhaseRow).where(*mine, PhaseRow.completed_at.is_not(None)).order_by(PhaseRow.step))
    found = []
    for phase in phases:
        after = session.scalars(select(StateRow).where(StateRow.phase_id == phase.id)).one_or_none()
        if after is None:
            continue
        earlier = (StateRow.federation_id == live.id, StateRow.id < after.id)
        before = session.scalars(select(StateRow).where(*earlier).order_by(StateRow.id.desc()).limit(1)).one_or_none()
        updates = global_state.counted(session, phase.id)
        digest = before.sha256 if before is not None and before.stored else None
        found.append(_Exchange(phase.id, phase.name, digest, tuple(updates)))
    return found


# Computing it


def _drift_job(engine: Engine, live: Live, first: str, digest: str) -> Callable[[], dict[str, TensorDrift]]:
    def job() -> dict[str, TensorDrift]:
        global_state.use_threads(live)
        start, now = (learned_prompts(live.method, _state(engine, one)) for one in (first, digest))
        found = prompt_metrics.drift(start, now)
        return {name: TensorDrift(distance=one.distance, relative=one.relative) for name, one in found.items()}

    return job


def _cosines_job(engine: Engine, live: Live, exchange: _Exchange) -> Callable[[], list[list[float | None]]]:
    def job() -> list[list[float | None]]:
        global_state.use_threads(live)
        if exchange.before is None:
            raise FileNotFoundError
        paths = [engine.blobs.path(sha256) for _, _, sha256 in exchange.updates[:MOST_CLIENTS]]
        return prompt_metrics.cosines(paths, _state(engine, exchange.before))

    return job


def _words_and_plane(engine: Engine, live: Live, found: rounds.Stored) -> tuple[WordsView | None, PlaneView | None]:
    global_state.use_threads(live)
    known = vocabulary.read(engine.blobs, live.lexicon) if live.lexicon is not None else None
    features = known.class_features if known is not None else {}
    method, state, context = live.method, _state(engine, found.sha256), live.context()
    words = None
    if known is not None and isinstance(method, LearnsContexts):
        contexts = method.contexts(state, context, features)
        words = _words(known, contexts) if contexts else None
    vectors = method.client_vectors(state, context, features) if isinstance(method, PlacesClients) else {}
    projected = prompt_metrics.plane(vectors)
    if projected is None:
        return words, None
    points = [PlanePoint(client=client, x=x, y=y) for client, (x, y) in projected.points.items()]
    kind: Literal["contexts", "descriptors"] = "contexts" if isinstance(method, GeneratesPrompts) else "descriptors"
    return words, PlaneView(of=kind, explained=list(projected.explained), points=points)


def _words(known: vocabulary.Lexicon, contexts: Tensors) -> WordsView:
    found = []
    for label, vectors in list(contexts.items())[:MOST_CONTEXTS]:
        rows = prompt_metrics.nearest(vectors, known.embeddings, NEAREST)
        near = [[NearestWord(word=known.words[at], distance=distance) for at, distance in row] for row in rows]
        found.append(ContextWords(label=label, vectors=near))
    return WordsView(spacing=prompt_metrics.spacing(known.embeddings), contexts=found)


def _state(engine: Engine, digest: str) -> Tensors:
    return decode_file(engine.blobs.path(digest))[0]
