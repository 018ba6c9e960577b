"""Forgetting a client: the federation goes back to before the client joined, and does the rounds since without it.

One transaction deletes the client's rows and those of all rounds since it joined, leaves tombstones in the audit log,
and has the run stand where that round opens. Blobs are removed afterwards. After a kill, asking once more finishes it.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock, events
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import jobs, recovery, retention
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations.clients import client_name
from promptfed.coordinator.operations.erasing import Erasing, Way, repeated_rounds
from promptfed.coordinator.operations.replay import joined_by_state
from promptfed.coordinator.problems import NotFound, Refusal
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.bucket_versions import NoVersions
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import (
    AuditRow,
    ClientRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)
from promptfed.shared.api.access_schemas import FORGOTTEN
from promptfed.shared.api.export_card import FederationName
from promptfed.shared.api.forgetting_schemas import (
    LIMITS,
    AuditPlace,
    Charge,
    ForgettingPlan,
    ForgettingReport,
    Forgotten,
)

OLDER = {None, "0.1.0", "0.2.0"}
REMOVED = "forgotten-erased"
"""The act of the entry that follows `FORGOTTEN` once blobs are removed."""


class CannotForget(Refusal, status=409, title="The client cannot be forgotten"):
    """The rounds cannot be repeated without the client: what is left to do is deleting the federation."""


# What it costs


def plan(registry: Registry, federation: Federation, client: str) -> ForgettingPlan:
    """What forgetting ``client`` costs. Raises NotFound, CannotForget."""
    name = client_name(federation, client)
    with registry.database.read() as session:
        way = _way(session, federation, name)
        charges = _charges(session, federation, name, way)
        older = [
            row.name
            for row in session.scalars(queries.clients(federation.id).order_by(ClientRow.name))
            if row.name != name and (row.software or {}).get("release") in OLDER
        ]
    return ForgettingPlan(
        federation=_name_of(federation),
        client=name,
        client_id=federation.clients[name].id,
        first_round=way.first,
        rounds=repeated_rounds(federation, way),
        charges=charges,
        older=older if way.first is not None and federation.method.personal else [],
    )


def _name_of(federation: Federation) -> FederationName:
    return FederationName(name=federation.name, id=federation.id, state=federation.run.state)


def _way(session: Session, federation: Federation, name: str) -> Way:
    """Raises CannotForget."""
    spec = federation.spec
    if federation.run.members[name].joined and spec.secure_aggregation is not None:
        text = "clients send one sum for each round, and the difference of two sums would be this client's part"
    elif federation.run.members[name].joined and spec.privacy.level == "client":
        text = "a second release of the same rounds is one that its privacy budget has not paid for"
    else:
        return _found_way(session, federation, name)
    raise CannotForget(f"{federation.name} cannot forget {name!r}: {text}; delete the federation instead")


def _found_way(session: Session, federation: Federation, name: str) -> Way:
    states = {state.id: state for state in session.scalars(queries.states(federation.id))}
    by_state = joined_by_state(session, federation)
    joined = {client: states[id].round for id, names in by_state.items() for client in names}
    first = joined.get(name)
    base = queries.last_state(session, federation.id, StateRow.round < first) if first else None
    if first and (base is None or not base.stored):
        first, base = 0, None  # The state of then is not kept: the whole run is repeated.
    before = [state for state in states.values() if first is None or state.round < first]
    kept = {
        "clients-joined": sum(state.id in by_state for state in before),
        "client-forgotten": sum(state.origin == jobs.FORGOTTEN for state in before),
    }
    return Way(first, base, joined, kept)


def _charges(session: Session, federation: Federation, name: str, way: Way) -> list[Charge]:
    if way.first is None:
        return []
    trained = queries.tasks_with_phases(federation.id).join(UpdateRow, UpdateRow.task_id == TaskRow.id)
    rows = trained.with_only_columns(TaskRow.client, PhaseRow.round, UpdateRow.metrics).order_by(UpdateRow.received_at)
    answers: dict[str, list[dict[str, Any]]] = {}
    before: set[str] = set()
    for client, round, metrics in session.execute(rows.where(TaskRow.client != name)):
        if round >= way.first:
            answers.setdefault(client, []).append(metrics)
        else:
            before.add(client)
    keeps = federation.method.personal or federation.spec.compression.up != "none"  # tensors from round to round
    gone = keeps and repeated_rounds(federation, way) > federation.spec.keep_rounds
    return [
        Charge(
            client=client,
            answers=len(sent),
            epsilon=sent[-1].get("privacy_epsilon"),
            starts_anew=gone and client in before,
        )
        for client, sent in sorted(answers.items())
    ]


# Doing it


async def forget(registry: Registry, id: str, client: str) -> ForgettingReport:
    """Forget ``client``, or finish what a kill has interrupted; what was done. Raises NotFound, CannotForget."""
    federation = registry.get(id)
    try:
        name = client_name(federation, client)
    except NotFound:
        with registry.database.read() as session:
            done = _done(session, id, client)
        if done is None:
            raise
    else:
        # On the thread for tensor work, so that no aggregate is computed from states that are deleted.
        context = copy_context()  # of the operator, for the audit log
        await registry.compute(lambda: context.run(_forget, registry, id, name))
        point("forget-committed")
        client = name
    return await asyncio.to_thread(_finish, registry, id, client)


def _finish(registry: Registry, id: str, client: str) -> ForgettingReport:
    retention.sweep(registry)  # also what its requests under way have left
    registry.database.erase(rewrite=True)
    kept = _purge(registry)
    point("forget-erased")
    federation = registry.get(id)
    with registry.database.read() as session:
        done = _done(session, id, client)
        assert done is not None, "the entry was written with the rows' deletion"
        entry, about = done
        last = _entry_after(session, entry)
    if last is None:
        with registry.change(id) as change:
            change.note(REMOVED, entry=entry.number)
        with registry.database.read() as session:
            last = _entry_after(session, entry)
    assert last is not None
    if about.restarts and federation.run.state == "enrolling":
        with suppress(Refusal):  # Too few are left, or it starts by itself.
            jobs.start(registry, id)
    return ForgettingReport(
        federation=_name_of(registry.get(id)),
        done=about,
        by=entry.actor,
        forgotten=AuditPlace(number=entry.number, at=entry.at, hash=entry.hash),
        erased=AuditPlace(number=last.number, at=last.at, hash=last.hash),
        limits=[*LIMITS, *kept],
    )


def _purge(registry: Registry) -> list[str]:
    """Remove versions of removed objects; what is to be said where that is not possible."""
    if registry.blobs.bucket is not None:
        try:
            registry.blobs.bucket.purge()
        except NoVersions as error:
            return [f"Versions that the bucket keeps of removed objects were not removed: {error}"]
    return []


def _done(session: Session, id: str, client: str) -> tuple[AuditRow, Forgotten] | None:
    """The entry of the audit log that says that ``client`` was forgotten, the last one if there are several."""
    entries = select(AuditRow).where(AuditRow.federation == id, AuditRow.act == FORGOTTEN)
    for entry in session.scalars(entries.order_by(AuditRow.number.desc())):
        about = Forgotten.model_validate(entry.detail)
        if about.client.is_of(client):
            return entry, about
    return None


def _entry_after(session: Session, entry: AuditRow) -> AuditRow | None:
    later = select(AuditRow).where(AuditRow.federation == entry.federation, AuditRow.act == REMOVED)
    rows = session.scalars(later.where(AuditRow.number > entry.number).order_by(AuditRow.number))
    return next((row for row in rows if row.detail["entry"] == entry.number), None)


def _forget(registry: Registry, id: str, name: str) -> None:
    """The transaction."""
    with registry.change(id) as change:
        session, federation = change.session, change.federation
        change.flush()
        way = _way(session, federation, name)
        erased = Erasing(change, name, way)
        erased.delete_rows()
        erased.go_back()
        change.note(FORGOTTEN, **erased.told().model_dump(mode="json"))
        if erased.repeat is not None:
            told = {"round": erased.repeat.round, "repeat": erased.repeat.id}
            change.emit("rounds-repeated", **told)
        change.flush()
        session.flush()
        session.expire_all()
        row = session.get_one(FederationRow, id)
        change.federation = recovery.load(session, row, clock.monotonic())
        change.everyone = True
        if change.federation.run.state == "running":
            change.send(events.Tick(clock.monotonic()))
        point("forget-before-commit")
    for known in (registry.retired, registry.damaged, registry.configs, registry.attempts):
        known.pop(id, None)
    registry.epoch = secrets.token_hex(8)  # Clients of earlier releases follow only another process.
