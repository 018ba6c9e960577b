"""Deletes a client's rows with those of the rounds since it joined, and has the run stand where these open again."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, func, select, update

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import retention
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.store import queries
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
from promptfed.shared.api.forgetting_schemas import Forgotten, Pseudonym
from promptfed.shared.messages import Repeat


@dataclass
class Way:
    """How far back it goes: ``first`` is the round that opens again, 0 with a new start, None for nowhere.

    ``joined``: by client, the round that it joined in. ``kept``: how many events stay of a kind of which each belongs
    to one state.
    """

    first: int | None
    base: StateRow | None = None
    joined: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)


def repeated_rounds(federation: Federation, way: Way) -> int:
    """How many rounds were begun that are repeated."""
    return 0 if way.first is None else federation.run.round - max(way.first, 1) + 1 if federation.run.round else 0


class Erasing:
    """One client's rows, and those of the rounds since it joined."""

    def __init__(self, change: Change, name: str, way: Way):
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
            rounds=repeated_rounds(self._federation, self._way),
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
