"""Tensor work: initial states, joining clients, payloads, aggregates. It runs in a thread, not on the event loop.

Each job reads committed data, computes, stores blobs, and commits once. Repeated after a kill it gives the same bytes,
since it depends only on committed data.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.aggregation import global_state, rows
from promptfed.coordinator.aggregation.global_state import Given, call, given
from promptfed.coordinator.aggregation.rules import Judged, Rule
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import SAME_CLASSES, Federation, OpenTask
from promptfed.coordinator.domain.round_machine import NotEnoughTrainers, WrongMoment
from promptfed.coordinator.engine import sums
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.engine.selection import rises_no_more, selected_round
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import Held
from promptfed.coordinator.store.stored_tensors import Stored, put_tensors, room
from promptfed.coordinator.store.tables import PhaseRow, StateRow, SumRow, TaskRow, UpdateRow
from promptfed.shared.methods.core.costs import needed_bytes
from promptfed.shared.methods.core.interface import Measured, MethodError, NeedsBackbone, Phase, ServerContext, has_own
from promptfed.shared.methods.core.refusals import check_clients, check_hopeless, check_sizes
from promptfed.shared.plain_text import counted
from promptfed.shared.secagg import SecureError
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import FINAL
from promptfed.shared.tensors import Arrays, TensorError, method_part, size_of, state_hash

FORGOTTEN = "forget"  # the origin of a state from which a client's own part was taken


@dataclass(frozen=True)
class Computed:
    """Result of an aggregation: the state, what the report keeps, what the rule made of each counted client."""

    after: Arrays
    measured: dict[str, Any]
    judged: Mapping[str, Judged]
    total: SumRow | None = None


def compute(registry: Registry, federation: Federation, state: Arrays, closed: PhaseRow, inputs: Given) -> Computed:
    """The state after the closed phase, of its stored updates or its secure sum.

    Raises:
        SecureError: the sum cannot be one of honest clients.
    """
    if federation.spec.secure_aggregation is not None:
        after, total, norm = sums.summed(registry, federation, state, closed)
        figures = {"sum_clients": total.count, "sum_weight": total.weight, "mean_norm": norm}
        return Computed(after, {"phase": figures, "clients": {}}, {}, total)
    phase = federation.method_phase(closed.round, closed.step)
    if federation.spec.privacy.protects_clients:
        return _computed_with_noise(registry, federation, state, closed, phase, inputs)
    changed: dict[str, float] = {}
    context, rule = federation.context(), Rule(federation.spec.aggregation, state)
    payload = lru_cache(maxsize=8)(lambda sha256: registry.blobs.tensors(sha256)[0])  # of most, the same
    with room(registry.blobs) as rule.room:
        stored = global_state.stored_updates(registry.blobs, inputs.updates, changed)
        measured = rows.measured(stored, lambda client: payload(inputs.payloads[client]), changed)
        after = global_state.after_phase(federation, state, phase, measured, rule, context)
    report = {**_finite(_measured(federation, state, phase, after, context)), "changes": _finite_numbers(changed)}
    return Computed(after, report, rule.judged)


def _computed_with_noise(
    registry: Registry, federation: Federation, state: Arrays, closed: PhaseRow, phase: Phase, inputs: Given
) -> Computed:
    terms = sums.terms_of(federation, closed)
    with registry.database.read() as session:
        before = sums.released(session, federation)
    stream, context = global_state.stored_updates(registry.blobs, inputs.updates), federation.context()
    after, mean = sums.noised(federation, state, phase, stream, terms, context)
    measures = _measured(federation, state, phase, after, context)
    noise = sums.noise_told(federation, terms, before + 1, registry.noise.kind)
    judged = {
        client: Judged("clipped" if length > terms.clip else "counted", 1 / terms.divisor, None)
        for client, length in mean.lengths.items()
    }
    report = {**_finite(measures), "changes": mean.lengths, "privacy": noise}
    return Computed(after, report, judged)


def note_judged(session: Session, phase_id: int, judged: Mapping[str, Judged]) -> None:
    """Store the rule's verdict on each counted update."""
    if not judged:
        return
    mine = (TaskRow.phase_id == phase_id, TaskRow.counted)
    rows = session.execute(
        select(TaskRow.client, UpdateRow).join(UpdateRow, UpdateRow.task_id == TaskRow.id).where(*mine)
    )
    for client, row in rows:
        if client in judged:
            row.judged = asdict(judged[client])


def _measured(federation: Federation, before: Arrays, phase: Phase, after: Arrays, context: ServerContext) -> Measured:
    if not has_own(federation.method, "measure"):
        return Measured()
    measured: Measured = call(federation, "measure", method_part(before), phase, method_part(after), context)
    return measured


def _finite(measured: Measured) -> dict[str, Any]:
    """The finite numbers of ``measured``, for the report."""
    clients = {name: _finite_numbers(numbers) for name, numbers in sorted(measured.clients.items())}
    return {"phase": _finite_numbers(measured.phase), "clients": clients}


def _finite_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def start(registry: Registry, id: str) -> None:
    """Make the initial state and start. Meanwhile nobody new can enrol, so the set of clients stays fixed.

    Raises:
        WrongState, NotEnoughClients, OtherClasses, InitialStateMissing, InitialStateMismatch, CannotStart: it cannot.
    """
    expect_startable(registry.get(id))
    registry.note(id, starting=True)
    try:
        _start_with_those_there_are(registry, id)
    finally:
        registry.note(id, starting=False)


def _start_with_those_there_are(registry: Registry, id: str) -> None:
    while True:
        federation = registry.get(id)
        expect_startable(federation)
        _expect_same_classes(federation)
        context = federation.context(list(federation.run.newcomers()))
        _expect_room(registry, federation, context)
        with registry.blobs.hold() as held:
            tensors = _initial_state(registry, federation, context)
            stored = put_tensors(registry.blobs, held, tensors)
            with registry.change(id) as change:
                if (
                    change.federation.run != federation.run
                    or change.federation.supplied_state != federation.supplied_state
                ):
                    continue  # Somebody was withdrawn, or another state supplied: it is made anew.
                change.keep(held)
                _commit_state(change, tensors, stored, "initial", None)
                _send_start(change)
                change.note("federation-start")
                point("start-before-commit")
        point("start-committed")
        return


def expect_startable(federation: Federation) -> None:
    """Raises WrongState or NotEnoughClients."""
    if federation.run.state != "enrolling":
        text = f"{federation.name} is {federation.run.state}: only a federation that is enrolling can be started"
        raise problems.WrongState(text, state=federation.run.state)
    trainers, needed = len(federation.run.starters(federation.rules)), federation.rules.min_clients
    if trainers < needed:
        who = "trainers" if federation.spec.rounds else "clients"
        text = f"enrolled {who}: {trainers}, needed: {needed}; enrol more, or lower participation.min_clients"
        raise problems.NotEnoughClients(text, enrolled=trainers, needed=needed)


def _expect_same_classes(federation: Federation) -> None:
    """Refuse to start with trainers who mean different classes, or write the same ones differently."""
    if (differences := federation.class_differences) is not None:
        raise problems.OtherClasses(f"{differences}: {SAME_CLASSES}")


def _expect_room(registry: Registry, federation: Federation, context: ServerContext) -> None:
    """Refuse to start if updates of these clients exceed limits, deadlines or the disk."""
    trainers = len(federation.run.starters(federation.rules))
    try:
        check_sizes(federation.spec, federation.method, context, trainers)
        check_clients(federation.spec, trainers)
        check_hopeless(federation.method, federation.spec, context, trainers)
        needed = needed_bytes(federation.spec, federation.method, context, trainers)
    except MethodError as error:
        raise problems.CannotStart(str(error)) from None
    free = shutil.disk_usage(registry.blobs.incoming).free
    if needed > free:
        who = counted(trainers, "trainer needs", "trainers need")
        text = f"{who} about {needed:,} bytes of disk at once, and {free:,} are free"
        raise problems.CannotStart(
            f"{text}: make room, train less, or send transport: bfloat16 where the method has it"
        )


def _send_start(change: Change) -> None:
    try:
        change.send(run_state.Start(clock.monotonic()))
    except (WrongMoment, NotEnoughTrainers):
        expect_startable(change.federation)
        raise


def _initial_state(registry: Registry, federation: Federation, context: ServerContext) -> Arrays:
    try:
        return global_state.initial_state(registry.blobs, federation, context)
    except NeedsBackbone as error:
        raise problems.InitialStateMissing(str(error)) from None
    except MethodError as error:
        raise problems.CannotStart(str(error)) from None
    except TensorError as error:
        raise problems.InitialStateMismatch(f"{error}; PUT another initial-state") from None


def join(registry: Registry, id: str) -> None:
    """Add newcomers to the state, one by one in order of name."""
    federation = registry.get(id)
    with registry.database.read() as session:
        state = current_state(registry, session, id)
    roster = [name for name, member in federation.run.members.items() if member.joined]
    with registry.metrics.job_seconds.labels("join").time():
        state = global_state.joined(federation, state, roster, federation.run.joining)
    with registry.blobs.hold() as held:
        stored = put_tensors(registry.blobs, held, state)
        with registry.change(id) as change:
            if (change.federation.run.due_job, change.federation.run.joining) != ("join", federation.run.joining):
                return
            change.keep(held)
            _commit_state(change, state, stored, "join", None)
            change.send(run_state.JobDone(clock.monotonic()))


def forget(registry: Registry, id: str, client: str) -> None:
    """Remove what the state keeps of ``client`` alone; repeating it changes nothing."""
    federation = registry.get(id)
    member = federation.run.members[client]
    if federation.run.state == "enrolling" or not member.joined:
        return
    with registry.database.read() as session:
        state = current_state(registry, session, id)
    after = global_state.forgotten(federation, state, client, federation.context())
    if after is state:
        return
    with registry.blobs.hold() as held:
        stored = put_tensors(registry.blobs, held, after)
        with registry.change(id) as change:
            change.keep(held)
            _commit_state(change, after, stored, FORGOTTEN, None)
            change.emit("client-forgotten", client=client)


def aggregate(registry: Registry, id: str) -> None:
    """Compute the state after the closed phase from its stored updates, or its secure sum, and commit it once."""
    federation = registry.get(id)
    point("phase-closed")
    run = federation.run
    with registry.database.read() as session:
        state = current_state(registry, session, id)
        phase = queries.phase_at(session, id, run.round, run.step)
        assert phase is not None, "the closed phase has begun"
        counted = given(session, federation, phase.id)
    with registry.metrics.job_seconds.labels("aggregate").time():
        try:
            result = compute(registry, federation, state, phase, counted)
        except SecureError as error:
            with registry.change(id) as change:
                change.send(run_state.SumInvalid(f"{error.kind}: {error}"))
            return
    point("aggregate-computed")
    with registry.blobs.hold() as held:
        stored = put_tensors(registry.blobs, held, result.after)
        with registry.change(id) as change:
            now = change.federation.run
            if (now.due_job, now.round, now.step) != ("aggregate", run.round, run.step):
                return
            change.keep(held)
            _commit_state(change, result.after, stored, phase.name, phase.id)
            change.batch.phases[phase.id]["measured"] = result.measured
            note_judged(change.session, phase.id, result.judged)
            if result.total is not None:
                change.session.add(result.total)
                sums.forget_answers(change.session, federation, run.round)
            change.send(run_state.JobDone(clock.monotonic()))
            _serve_at_once(registry, change, held, result.after)
            point("state-before-commit")
    point("state-committed")
    if result.total is not None:
        point("exchanges-deleted")
    judged = result.judged
    verdicts = Counter(judged[c].verdict if c in judged else "counted" for c, _, _ in counted.updates)
    for verdict, number in verdicts.items():
        registry.metrics.updates.labels(verdict).inc(number)


def judge(registry: Registry, id: str) -> None:
    """After an evaluation: go on, or end the rounds where the figures rise no more."""
    federation = registry.get(id)
    with registry.database.read() as session:
        ends = rises_no_more(session, federation)
    with registry.change(id) as change:
        now, run = clock.monotonic(), change.federation.run
        if (run.due_job, run.round) == ("judge", federation.run.round):
            change.send(run_state.NoRise(now) if ends else run_state.JobDone(now))


def fill_payloads(registry: Registry, id: str) -> None:
    """Make the payload of each open task that has none yet."""
    federation = registry.get(id)
    pending = [task for task in federation.tasks.values() if task.payload_sha256 is None]
    if pending and pending[0].kind == "share" and (out := sums.unfit(registry, federation, pending[0])):
        with registry.change(id) as change:
            sums.leave_out(change, pending[0], out)
        registry.attempts.pop(id, None)
        return
    with registry.database.read() as session:
        state = method_part(_served_state(registry, session, federation))
    with registry.blobs.hold() as held:
        made = _with_payloads(registry, held, federation, state, pending)
        with registry.change(id) as change:
            change.keep(held)
            _serve(change, made)
            point("payloads-before-commit")
    point("payloads-committed")


def _serve_at_once(registry: Registry, change: Change, held: Held, state: Arrays) -> None:
    """Make the payload of a newly opened stage in the transaction that commits its state.

    Only one that is small and the same for all clients: others would keep everybody else from writing.
    """
    federation = change.federation
    opened = [task for task in federation.tasks.values() if task.payload_sha256 is None]
    at_once = federation.method.one_payload and federation.spec.secure_aggregation is None
    if opened and at_once and registry.blobs.is_small(size_of(state)):
        made = _with_payloads(registry, held, federation, method_part(state), opened)
        change.keep(held)
        _serve(change, made)


def _with_payloads(
    registry: Registry, held: Held, federation: Federation, state: Arrays, tasks: list[OpenTask]
) -> dict[str, OpenTask]:
    """The tasks with their payloads, which are stored, by id. ``state``: the method's part."""
    begun = time.perf_counter()
    context = federation.context()
    made: dict[str, OpenTask] = {}
    last: tuple[tuple[object, ...], Arrays, Stored] | None = None
    for task in tasks:
        if task.kind not in ("train", "evaluate"):
            content = sums.told(registry, federation, task)
            digest = held.put(content)
            made[task.id] = replace(task, payload_sha256=digest, payload_bytes=len(content))
            continue
        stage = task.kind, task.round, task.step
        if last is None or last[0] != stage or not federation.method.one_payload:
            phase = federation.method_phase(task.round, task.step) if task.kind == "train" else None
            tensors = global_state.payload(federation, state, phase, federation.clients[task.client], context)
            alike = last is not None and _are_the_same(last[1], tensors)
            stored = last[2] if last is not None and alike else put_tensors(registry.blobs, held, tensors)
            if federation.method.one_payload:
                registry.blobs.remember(held, stored.digest)
            last = stage, tensors, stored
        made[task.id] = replace(task, payload_sha256=last[2].digest, payload_bytes=last[2].size)
    registry.metrics.job_seconds.labels("payloads").observe(time.perf_counter() - begun)
    return made


def _are_the_same(first: Arrays, second: Arrays) -> bool:
    """Whether these are the same objects: most methods give every client the same tensors, which are encoded once."""
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


def _serve(change: Change, made: dict[str, OpenTask]) -> None:
    """Store the payloads of these tasks, and tell their clients."""
    payloads = {id: (str(task.payload_sha256), task.payload_bytes) for id, task in made.items()}
    change.batch.serve(payloads)
    change.wake.update(task.client for task in made.values())
    tasks = {name: made.get(task.id, task) for name, task in change.federation.tasks.items()}
    change.federation = replace(change.federation, tasks=tasks)


def _served_state(registry: Registry, session: Session, federation: Federation) -> Arrays:
    """The state that the open stage is about: in the final test that of the selected round."""
    if federation.phase != FINAL:
        return current_state(registry, session, federation.id)
    row = queries.last_state(session, federation.id, StateRow.round <= selected_round(session, federation))
    assert row is not None, "a federation that selects keeps all states"
    return registry.blobs.tensors(row.sha256)[0]


def current_state(registry: Registry, session: Session, id: str) -> Arrays:
    """The state that was committed last."""
    sha256 = session.connection().execute(queries.LAST_STATE, {"id": id}).scalar_one()
    return registry.blobs.tensors(sha256)[0]


def _commit_state(change: Change, tensors: Arrays, stored: Stored, origin: str, phase_id: int | None) -> None:
    facts = {"round": change.federation.run.round, "origin": origin, "state_hash": state_hash(tensors)}
    row = {"federation_id": change.federation.id, "phase_id": phase_id, "sha256": stored.digest, "bytes": stored.size}
    change.batch.states.append(facts | row | {"stored": True})
    change.emit("state-committed", **facts)
