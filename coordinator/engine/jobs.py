"""Tensor work: initial states, joinings, payloads, aggregates. It runs in a thread, never on the event loop.

Each job reads what is committed, computes, stores blobs, and commits once. Killed anywhere and done again it comes to
the same bytes, because it depends on nothing but what is committed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.aggregation.rules import Judged, Rule
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Live, OpenTask
from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.coordinator.domain.run_state import Start, WorkDone
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.problems import (
    CannotStart,
    InitialStateMismatch,
    InitialStateMissing,
    NotEnoughClients,
    WrongState,
)
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import PhaseRow, StateRow, TaskRow, UpdateRow
from promptfed.shared.methods.core.base import MethodError, NeedsBackbone, ServerContext
from promptfed.shared.methods.core.insights import Measured, MeasuresPhases
from promptfed.shared.tensors import TensorError, Tensors, decode_file, encode, state_hash

if TYPE_CHECKING:
    from promptfed.coordinator.engine.registry import Engine


def start(engine: Engine, id: str) -> None:
    """Make the initial state and start.

    Raises:
        WrongState, NotEnoughClients, InitialStateMissing, InitialStateMismatch, CannotStart: it cannot.
    """
    while True:
        live = engine.live(id)
        _expect_startable(live)
        roster = [name for name, member in live.run.members.items() if member.active]
        context = live.context(roster)
        with engine.blobs.hold() as held:
            tensors = _initial_state(engine, live, context)
            content = encode(tensors)
            held.put(content)
            with engine.change(id) as change:
                if change.live.run != live.run or change.live.supplied_state != live.supplied_state:
                    continue  # Somebody enrolled meanwhile: the state is made for the clients that there are.
                _commit_state(change, tensors, content, "initial", None)
                _send_start(change)
                point("start-before-commit")
        point("start-committed")
        return


def _expect_startable(live: Live) -> None:
    if live.run.state != "enrolling":
        text = f"{live.name} is {live.run.state}: only a federation that is enrolling can be started"
        raise WrongState(text, state=live.run.state)
    trainers, needed = len(live.run.trainers()), live.rules.min_clients
    if trainers < needed:
        text = f"{trainers} trainers are enrolled; {needed} are needed: enrol more, or lower participation.min_clients"
        raise NotEnoughClients(text, enrolled=trainers, needed=needed)


def _send_start(change: Change) -> None:
    try:
        change.send(Start(clock.monotonic()))
    except (WrongMoment, NotEnoughTrainers):
        _expect_startable(change.live)
        raise


def _initial_state(engine: Engine, live: Live, context: ServerContext) -> Tensors:
    global_state.use_threads(live)
    try:
        return global_state.initial_state(engine.blobs, live, context)
    except NeedsBackbone as error:
        raise InitialStateMissing(str(error)) from None
    except MethodError as error:
        raise CannotStart(str(error)) from None
    except TensorError as error:
        raise InitialStateMismatch(f"{error}; PUT another initial-state") from None


def join(engine: Engine, id: str) -> None:
    """Let newcomers into the state, one by one in order of name."""
    live = engine.live(id)
    with engine.database.read() as session:
        state = current_state(engine, session, id)
    global_state.use_threads(live)
    roster = [name for name, member in live.run.members.items() if member.joined]
    with engine.measures.work.labels("join").time():
        state = global_state.joined(live, state, roster, live.run.joining)
    with engine.blobs.hold() as held:
        content = encode(state)
        held.put(content)
        with engine.change(id) as change:
            if (change.live.run.work, change.live.run.joining) != ("join", live.run.joining):
                return
            _commit_state(change, state, content, "join", None)
            change.send(WorkDone(clock.monotonic()))


def aggregate(engine: Engine, id: str) -> None:
    """Compute the state after the closed phase from its stored updates, and commit it once."""
    live = engine.live(id)
    point("phase-closed")
    run = live.run
    with engine.database.read() as session:
        state = current_state(engine, session, id)
        phase_id, phase_name = _closed_phase(session, live)
        updates = global_state.counted(session, phase_id)
    global_state.use_threads(live)
    context, rule = live.context(), Rule(live.spec.aggregation, state)
    with engine.measures.work.labels("aggregate").time():
        stream = global_state.stored_updates(engine.blobs, updates)
        phase = live.method_phase(run.round, run.step)
        after = global_state.after_phase(live, state, phase, stream, rule, context)
        method = live.method
        measures = method.measure(state, phase, after, context) if isinstance(method, MeasuresPhases) else Measured()
    point("aggregate-computed")
    with engine.blobs.hold() as held:
        content = encode(after)
        held.put(content)
        with engine.change(id) as change:
            now = change.live.run
            if (now.work, now.round, now.step) != ("aggregate", run.round, run.step):
                return
            _commit_state(change, after, content, phase_name, phase_id)
            change.session.get_one(PhaseRow, phase_id).measured = _finite(measures)
            _note_judged(change.session, phase_id, rule.judged)
            change.send(WorkDone(clock.monotonic()))
            point("state-before-commit")
    point("state-committed")
    for client, _, _ in updates:
        verdict = rule.judged[client].verdict if client in rule.judged else "counted"
        engine.measures.updates.labels(verdict).inc()


def _note_judged(session: Session, phase_id: int, judged: Mapping[str, Judged]) -> None:
    mine = (TaskRow.phase_id == phase_id, TaskRow.counted)
    rows = session.execute(
        select(TaskRow.client, UpdateRow).join(UpdateRow, UpdateRow.task_id == TaskRow.id).where(*mine)
    )
    for client, row in rows:
        if client in judged:
            row.judged = asdict(judged[client])


def _finite(measured: Measured) -> dict[str, Any] | None:
    """What a report keeps of ``measured``; None where there is nothing."""
    clients = {name: _finite_numbers(numbers) for name, numbers in sorted(measured.clients.items())}
    found = {"phase": _finite_numbers(measured.phase), "clients": clients}
    return found if any(found.values()) else None


def _finite_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def fill_payloads(engine: Engine, id: str) -> None:
    """Make the payload of each open task that has none yet."""
    live = engine.live(id)
    pending = [task for task in live.tasks.values() if task.payload_sha256 is None]
    with engine.database.read() as session:
        state = current_state(engine, session, id)
    global_state.use_threads(live)
    context = live.context()
    with engine.blobs.hold() as held:
        made: dict[str, OpenTask] = {}
        last: tuple[Tensors, str, int] | None = None
        with engine.measures.work.labels("payloads").time():
            for task in pending:
                phase = live.method_phase(task.round, task.step) if task.kind == "train" else None
                tensors = live.method.payload(state, phase, live.clients[task.client].info(), context)
                if last is None or not _are_the_same(last[0], tensors):
                    content = encode(tensors)
                    last = tensors, held.put(content), len(content)
                made[task.id] = replace(task, payload_sha256=last[1], payload_bytes=last[2])
        with engine.change(id) as change:
            _serve(change, made)
            point("payloads-before-commit")
    point("payloads-committed")


def _are_the_same(one: Tensors, other: Tensors) -> bool:
    """Whether these are the very same tensors: what most methods give to every client needs to be encoded once."""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _serve(change: Change, made: dict[str, OpenTask]) -> None:
    tasks = {name: made.get(task.id, task) for name, task in change.live.tasks.items()}
    change.live = replace(change.live, tasks=tasks)
    unserved = (TaskRow.federation_id == change.live.id, TaskRow.payload_sha256.is_(None))
    for row in change.session.scalars(select(TaskRow).where(*unserved)):
        if row.id not in made:
            continue
        row.payload_sha256, row.payload_bytes = made[row.id].payload_sha256, made[row.id].payload_bytes
        row.payload_stored = True
        change.wake.add(row.client)


def current_state(engine: Engine, session: Session, id: str) -> Tensors:
    """The state that was committed last."""
    row = session.scalars(
        select(StateRow).where(StateRow.federation_id == id).order_by(StateRow.id.desc()).limit(1)
    ).one()
    return decode_file(engine.blobs.path(row.sha256))[0]


def _closed_phase(session: Session, live: Live) -> tuple[int, str]:
    here = (PhaseRow.federation_id == live.id, PhaseRow.round == live.run.round, PhaseRow.step == live.run.step)
    row = session.scalars(select(PhaseRow).where(*here)).one()
    return row.id, row.name


def _commit_state(change: Change, tensors: Tensors, content: bytes, origin: str, phase_id: int | None) -> None:
    row = StateRow(
        federation_id=change.live.id,
        round=change.live.run.round,
        phase_id=phase_id,
        origin=origin,
        state_hash=state_hash(tensors),
        sha256=digest_of(content),
        bytes=len(content),
        committed_at=clock.now(),
        stored=True,
    )
    change.session.add(row)
    change.tell("state-committed", round=row.round, origin=origin, state_hash=row.state_hash)
