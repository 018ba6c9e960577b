"""More past rounds for a federation that really ran: rows, copied in bulk while no coordinator runs it.

Every row of a copied round is a row of a round that was played, under new ids and digests: all tables, all columns, and
what retention has left of it are as in a real run. Copied tensors differ in their last two numbers, and so do digests.
"""

from __future__ import annotations

import random
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, Table, create_engine, func, insert, select, text, update

from promptfed.coordinator.engine.recorder import new_task_id
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.opening import SQLITE_FILE
from promptfed.coordinator.store.tables import (
    Base,
    BlobRow,
    EvaluationRow,
    EventRow,
    ExchangeRow,
    FederationRow,
    PhaseRow,
    StateRow,
    SumRow,
    TaskRow,
    UpdateRow,
)

Row = dict[str, Any]
OF_TASKS = (UpdateRow, EvaluationRow, ExchangeRow)
NUMBERED = (PhaseRow, StateRow, EventRow)
AT_ONCE = 20  # rounds that are written together


def table_of(row: type[Base]) -> Table:
    """The table of a row class."""
    assert isinstance(row.__table__, Table)
    return row.__table__


def url_of(folder: Path, database_url: str | None = None) -> str:
    """Where a coordinator with this data folder has its tables."""
    return database_url or f"sqlite:///{folder / SQLITE_FILE}"


def add_past_rounds(url: str, id: str, rounds: int) -> None:
    """Insert ``rounds`` rounds before the last completed round of a federation, each a copy of the one before.

    No coordinator works on the database at ``url``. The third round must be open at least, and all blobs must be rows.
    """
    engine = create_engine(url)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":  # SQLite checks no foreign keys unless it is told to
            connection.execute(text("SET session_replication_role = replica"))
        _add(connection, id, rounds)
    engine.dispose()


def _add(connection: Connection, id: str, rounds: int) -> None:
    open_round = connection.execute(select(FederationRow.round).where(FederationRow.id == id)).scalar_one()
    template = _Template.read(connection, id, open_round - 2)
    _make_room(connection, id, template, rounds)
    for begin in range(0, rounds, AT_ONCE):
        copies: dict[type[Base], list[Row]] = {}
        for number in range(begin + 1, min(begin + AT_ONCE, rounds) + 1):
            for kind, row in template.copy(number):
                copies.setdefault(kind, []).append(row)
        for kind, rows in copies.items():
            connection.execute(insert(table_of(kind)), rows)
    following = select(PhaseRow.id).where(PhaseRow.federation_id == id, PhaseRow.round > template.round + rounds)
    same = (TaskRow.phase_id.in_(following), TaskRow.payload_sha256 == template.state)
    connection.execute(update(table_of(TaskRow)).where(*same).values(payload_sha256=template.newest))
    if connection.dialect.name == "postgresql":
        for kind in NUMBERED:
            name = kind.__tablename__
            last = select(func.max(table_of(kind).c.id)).scalar_subquery()
            connection.execute(select(func.setval(func.pg_get_serial_sequence(name, "id"), last)))


@dataclass
class _Template:
    """The rows of one round, by their classes.

    ``before`` and ``state``: the digests of the state that it begins with, which mostly is its payload, and of its
    last one. ``newest``: the digest of the last copy of ``state``.
    """

    round: int
    rows: dict[type[Base], list[Row]]
    before: str
    state: str
    newest: str

    @classmethod
    def read(cls, connection: Connection, id: str, round: int) -> _Template:
        assert round >= 1, "the third round is open at least"
        rows: dict[type[Base], list[Row]] = {}

        def read(kind: type[Base], where: Callable[[Any], Any]) -> list[Row]:
            table = table_of(kind)
            rows[kind] = [dict(row) for row in connection.execute(select(table).where(where(table.c))).mappings()]
            return rows[kind]

        phases = [row["id"] for row in read(PhaseRow, lambda c: (c.federation_id == id) & (c.round == round))]
        tasks = read(TaskRow, lambda c: c.phase_id.in_(phases))
        for kind in OF_TASKS:
            read(kind, lambda c: c.task_id.in_([task["id"] for task in tasks]))
        read(SumRow, lambda c: c.phase_id.in_(phases))
        states = read(StateRow, lambda c: (c.federation_id == id) & (c.round == round))
        events = read(EventRow, lambda c: c.federation_id == id)
        rows[EventRow] = [row for row in events if row["data"].get("round") == round]
        named = [row["sha256"] for row in (*states, *rows[UpdateRow])] + [task["payload_sha256"] for task in tasks]
        blobs = read(BlobRow, lambda c: c.digest.in_(set(named)))
        kept = {row["sha256"] for row in (*states, *rows[UpdateRow]) if row["stored"]}
        assert kept <= {row["digest"] for row in blobs}, "all blobs are rows"
        earlier = select(StateRow.sha256).where(StateRow.federation_id == id, StateRow.round < round)
        before = connection.execute(earlier.order_by(StateRow.id.desc()).limit(1)).scalar_one()
        rows[BlobRow] = [row for row in blobs if row["digest"] != before]
        return cls(round, rows, before, states[-1]["sha256"], states[-1]["sha256"])

    def copy(self, number: int) -> Iterator[tuple[type[Base], Row]]:
        """The rows of the copy ``number`` rounds later, those that others refer to first."""
        digests = {self.before: self.newest}
        tasks = {task["id"]: new_task_id() for task in self.rows[TaskRow]}

        def fresh(digest: str | None) -> str | None:
            return None if digest is None else digests.setdefault(digest, f"sha256:{secrets.token_hex(32)}")

        for row in self.rows[BlobRow]:
            # The last numbers of the last tensor: other bytes, and still tensors of the same sizes. One number has too
            # few values for thousands of copies.
            content = row["content"][:-8] + struct.pack("<2f", random.random(), random.random())
            digests[row["digest"]] = digest_of(content)
            yield BlobRow, {"digest": digests[row["digest"]], "content": content}
        for kind in (PhaseRow, TaskRow, *OF_TASKS, SumRow, StateRow, EventRow):
            for row in self.rows[kind]:
                copy = dict(row)
                for key in copy.keys() & {"sha256", "payload_sha256"}:
                    copy[key] = fresh(copy[key])
                if kind is TaskRow:
                    copy["id"] = tasks[copy["id"]]
                if "task_id" in copy:
                    copy["task_id"] = tasks[copy["task_id"]]
                if kind in NUMBERED:
                    copy["id"] += number * len(self.rows[kind])
                if copy.get("phase_id") is not None:
                    copy["phase_id"] += number * len(self.rows[PhaseRow])
                if "round" in copy:
                    copy["round"] += number
                if kind is EventRow:
                    copy["data"] = copy["data"] | {"round": copy["data"]["round"] + number}
                yield kind, copy
        self.newest = digests[self.state]


def _make_room(connection: Connection, id: str, template: _Template, rounds: int) -> None:
    """Number the rows of later rounds as if ``rounds`` rounds had come before them."""
    last = {kind: max((row["id"] for row in template.rows[kind]), default=0) for kind in NUMBERED}
    more = {kind: rounds * len(template.rows[kind]) for kind in NUMBERED}

    def shift(kind: type[Base], column: Column[Any], of: type[Base]) -> None:
        # By way of negative numbers: no two rows ever have the same one.
        table, later = table_of(kind), column > last[of]
        connection.execute(update(table).where(later).values({column.name: -(column + more[of])}))
        connection.execute(update(table).where(column < 0).values({column.name: -column}))

    for event in connection.execute(select(table_of(EventRow)).where(EventRow.id > last[EventRow])).all():
        if event.federation_id == id and event.data.get("round") is not None:
            data = event.data | {"round": event.data["round"] + rounds}
            connection.execute(update(table_of(EventRow)).where(EventRow.id == event.id).values(data=data))
    for kind in (PhaseRow, StateRow):
        columns = table_of(kind).c
        later_rounds = (columns.federation_id == id, columns.round > template.round)
        connection.execute(update(table_of(kind)).where(*later_rounds).values(round=-(columns.round + rounds)))
        connection.execute(update(table_of(kind)).where(columns.round < 0).values(round=-columns.round))
    for kind in NUMBERED:
        shift(kind, table_of(kind).c.id, kind)
    for kind in (TaskRow, StateRow, SumRow):
        shift(kind, table_of(kind).c.phase_id, PhaseRow)
    mine = update(table_of(FederationRow)).where(FederationRow.id == id)
    connection.execute(mine.values(round=FederationRow.round + rounds))
