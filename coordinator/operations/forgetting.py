"""Forgetting a client: the federation goes back to before the client joined, and does the rounds since without it.

One transaction deletes the client's rows and those of all rounds since it joined, leaves tombstones in the audit log,
and has the run stand where that round opens. Blobs are removed afterwards. After a kill, asking once more finishes it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from promptfed.coordinator.domain import clock, events
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import jobs, recovery, retention
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations.clients import client_name
from promptfed.coordinator.operations.replay import joined_by_state
from promptfed.coordinator.problems import NotFound, Refusal
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.tables import (
    AuditRow,
    ClientRow,
    EvaluationRow,
    EventRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    TokenRow,
    UpdateRow,
)
from promptfed.shared.api.access_schemas import ERASED, FORGOTTEN
from promptfed.shared.api.export_card import FederationName
from promptfed.shared.api.forgetting_schemas import (
    LIMITS,
    AuditPlace,
    Charge,
    ForgettingPlan,
    ForgettingReport,
    Forgotten,
    Pseudonym,
)
from promptfed.shared.messages import Repeat
from promptfed.shared.spec.versions import NEWEST, RELEASES

OLDER = {None, *(release for version, release in RELEASES.items() if version < NEWEST)}
REMOVED = "forgotten-erased"
"""The act of the entry that follows `FORGOTTEN` once blobs are removed."""


class CannotForget(Refusal, status=409, title="The client cannot be forgotten"):
    """The rounds cannot be repeated without the client: what is left to do is deleting the federation."""


@dataclass
class _Way:
    """How far back it goes: ``first`` is the round that opens again, 0 with a new start, None for nowhere.

    ``joined``: by client, the round that it joined in. ``kept``: how many events stay of a kind of which each belongs
    to one state.
    """

    first: int | None
    base: StateRow | None = None
    joined: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)


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
        rounds=_rounds(federation, way),
        charges=charges,
        older=older if way.first is not None and federation.method.personal else [],
    )


def _name_of(federation: Federation) -> FederationName:
    return FederationName(name=federation.name, id=federation.id, state=federation.run.state)


def _rounds(federation: Federation, way: _Way) -> int:
    return 0 if way.first is None else federation.run.round - max(way.first, 1) + 1 if federation.run.round else 0


def _way(session: Session, federation: Federation, name: str) -> _Way:
    """Raises CannotForget."""
    spec = federation.spec
    if spec.trial is not None or spec.tuning is not None:
        text = "its method was chosen, or is being chosen, by what this client has measured too"
    elif federation.run.members[name].joined and spec.secure_aggregation is not None:
        text = "clients send one sum for each round, and the difference of two sums would be this client's part"
    elif federation.run.members[name].joined and spec.privacy.level == "client":
        text = "a second release of the same rounds is one that its privacy budget has not paid for"
    elif federation.run.members[name].joined and spec.schedule is not None:
        text = "asynchronous rounds depend on when each answer comes, and cannot be repeated"
    else:
        return _found_way(session, federation, name)
    raise CannotForget(f"{federation.name} cannot forget {name!r}: {text}; delete the federation instead")


def _found_way(session: Session, federation: Federation, name: str) -> _Way:
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
    return _Way(first, base, joined, kept)


def _charges(session: Session, federation: Federation, name: str, way: _Way) -> list[Charge]:
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
    gone = federation.method.personal and _rounds(federation, way) > federation.spec.keep_rounds
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
        await asyncio.to_thread(retention.sweep, registry)
    else:
        # On the thread for tensor work, so that no aggregate is computed from states that are deleted.
        context = copy_context()  # of the operator, for the audit log
        digests = await registry.compute(lambda: context.run(_forget, registry, id, name))
        point("forget-committed")
        await asyncio.to_thread(retention.collect, registry, digests)
        client = name
    return await asyncio.to_thread(_finish, registry, id, client)


def _finish(registry: Registry, id: str, client: str) -> ForgettingReport:
    retention.sweep_partial(registry)
    registry.database.erase(rewrite=True)
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
        limits=[*LIMITS, *_of_objects(registry)],
    )


def _of_objects(registry: Registry) -> list[str]:
    if registry.blobs.bucket is None:
        return []
    return ["Objects were deleted; a bucket that keeps versions removes them by its own lifecycle rule."]


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


def _forget(registry: Registry, id: str, name: str) -> set[str]:
    """The transaction; returns the digests that the deleted rows named."""
    with registry.change(id) as change:
        session, federation = change.session, change.federation
        change.flush()
        way = _way(session, federation, name)
        erased = _Erasing(change, name, way)
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
    return erased.digests


class _Erasing:
    """One client's rows, and those of the rounds since it joined."""

    def __init__(self, change: Change, name: str, way: _Way):
        self._change, self._session, self._federation = change, change.session, change.federation
        self._name, self._way = name, way
        self._id = self._federation.id
        self._client = queries.client(self._session, self._id, name)
        self._secrets = {name, self._client.id}
        self.digests: set[str] = set()
        self.rows: dict[str, int] = {}
        self.repeat: Repeat | None = None

    def told(self) -> Forgotten:
        """For the audit log. What names the client is erased there first."""
        return Forgotten(
            client=Pseudonym.of(self._name),
            first_round=self._way.first,
            rounds=_rounds(self._federation, self._way),
            restarts=self._way.first == 0 and self._federation.run.state in ("running", "finished"),
            state_hash=self._way.base.state_hash if self._way.base is not None else None,
            repeat=self.repeat.id if self.repeat is not None else None,
            rows=self.rows,
            blobs=len(self.digests),
            tombstones=self._bury(),
        )

    # Rows

    def delete_rows(self) -> None:
        """Delete the rounds since the client joined, and the client with its tokens."""
        if self._way.first is not None:
            phases = (PhaseRow.federation_id == self._id, PhaseRow.round >= self._way.first)
            states = (StateRow.federation_id == self._id, StateRow.round >= self._way.first)
            tasks = TaskRow.phase_id.in_(select(PhaseRow.id).where(*phases))
            answered = select(TaskRow.id).where(tasks)
            self._name_digests(select(StateRow.sha256).where(*states))
            self._name_digests(select(TaskRow.payload_sha256).where(tasks))
            self._name_digests(select(UpdateRow.sha256).where(UpdateRow.task_id.in_(answered)))
            self._delete("updates", UpdateRow, UpdateRow.task_id.in_(answered))
            self._delete("evaluations", EvaluationRow, EvaluationRow.task_id.in_(answered))
            self._delete("tasks", TaskRow, tasks)
            self._delete("states", StateRow, *states)
            self._delete("phases", PhaseRow, *phases)
        self._close_tokens()
        self._delete("clients", ClientRow, ClientRow.id == self._client.id)
        self._delete_events()

    def _name_digests(self, query: Any) -> None:
        self.digests.update(digest for digest in self._session.scalars(query) if digest)

    def _delete(self, table: str, kind: Any, *where: Any) -> None:
        found: Any = self._session.execute(delete(kind).where(*where), execution_options={"synchronize_session": False})
        self.rows[table] = self.rows.get(table, 0) + found.rowcount

    def _close_tokens(self) -> None:
        """Delete the tokens that nobody else has used or can; close one that others came by."""
        mine = select(TokenRow).where(TokenRow.federation_id == self._id)
        own = (TokenRow.client == self._name) | (TokenRow.id == self._client.token_id)
        for token in self._session.scalars(mine.where(own)).all():
            others = select(func.count()).where(ClientRow.token_id == token.id, ClientRow.id != self._client.id)
            if token.client != self._name and (self._session.scalar(others) or token.uses != 1):
                token.closed = True
                continue
            self._secrets |= {token.id, token.name}
            self._session.delete(token)
            self.rows["tokens"] = self.rows.get("tokens", 0) + 1
        self._session.flush()

    def _delete_events(self) -> None:
        """Delete what the stream tells of the client and of the deleted rounds."""
        first, seen, gone = self._way.first, Counter[str](), []
        mine = select(EventRow).where(EventRow.federation_id == self._id).order_by(EventRow.id)
        for event in self._session.scalars(mine):
            seen[event.kind] += 1
            undone = first is not None and seen[event.kind] > self._way.kept.get(event.kind, seen[event.kind])
            late = first is not None and event.data.get("round", -1) >= first
            if late or undone or _holds(event.data, self._secrets):
                gone.append(event.id)
        for begin in range(0, len(gone), retention.AT_ONCE):
            self._delete("events", EventRow, EventRow.id.in_(gone[begin : begin + retention.AT_ONCE]))

    # The run

    def go_back(self) -> None:
        """Have the run stand where the first round opens, and others join in the rounds in which they did."""
        first, run = self._way.first, self._federation.run
        if first is None:
            return
        for row in self._session.scalars(queries.clients(self._id)):
            since = self._way.joined.get(row.name, 0)
            if row.joined and since >= first:
                row.joined, row.joins_from = False, since
        self.repeat = Repeat(id=secrets.token_hex(8), round=first)
        state = {"finished": "enrolling" if first == 0 else "running"}.get(run.state, run.state)
        if first == 0 and run.state in ("running", "paused"):
            state = "enrolling"
        standing: dict[str, Any] = {"state": state, "round": first, "step": 0, "work": None, "joining": []}
        if state != run.state:
            standing |= {"ended_at": None, **({"started_at": None} if first == 0 else {})}
        reason = run.reason if state == run.state and state in ("failed", "cancelled") else None
        repeats = [one.model_dump() for one in (*self._federation.repeats, self.repeat)]
        mine = update(FederationRow).where(FederationRow.id == self._id)
        self._session.execute(mine.values(**standing, reason=reason, repeats=repeats))

    # The audit log

    def _bury(self) -> dict[str, str]:
        """Erase the entries that name the client; their numbers and hashes stay, as the chain needs them."""
        buried: dict[str, str] = {}
        for entry in self._session.scalars(select(AuditRow).where(AuditRow.federation == self._id)):
            if entry.act not in (ERASED, FORGOTTEN) and (
                entry.actor in self._secrets or _holds(entry.detail, self._secrets)
            ):
                buried[str(entry.number)] = entry.hash
        empty: dict[str, Any] = {
            "at": "",
            "actor": "",
            "role": "",
            "address": "",
            "federation_name": None,
            "detail": {},
        }
        for begin in range(0, len(buried), retention.AT_ONCE):
            some = [int(number) for number in list(buried)[begin : begin + retention.AT_ONCE]]
            self._session.execute(update(AuditRow).where(AuditRow.number.in_(some)).values(act=ERASED, **empty))
        return buried


def _holds(value: Any, wanted: set[str]) -> bool:
    """Whether one of ``wanted`` is a text in ``value``, at any depth."""
    if isinstance(value, dict):
        return any(_holds(one, wanted) for one in value.values()) or not wanted.isdisjoint(value)
    if isinstance(value, list):
        return any(_holds(one, wanted) for one in value)
    return value in wanted if isinstance(value, str) else False
