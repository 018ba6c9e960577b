"""Rows that a transaction writes together: one statement for each table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import Insert, Update

from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.postgres import together
from promptfed.coordinator.store.tables import (
    AuditRow,
    Base,
    BlobRow,
    ClientRow,
    EvaluationRow,
    EventRow,
    ExchangeRow,
    FederationRow,
    ObjectRow,
    PhaseRow,
    StateRow,
    TaskRow,
    TokenRow,
    UpdateRow,
)

Row = dict[str, Any]


def _updated(table: type[Base], key: Any) -> Update:
    """Update rows by their ``key``; the parameters' other names are those of the columns to set."""
    return update(table.__table__).where(key == bindparam("key"))  # type: ignore[arg-type]


_TASKS = _updated(TaskRow, TaskRow.id)
_TOKENS = _updated(TokenRow, TokenRow.digest)
_REFUSED = (
    update(ClientRow.__table__)  # type: ignore[arg-type]
    .where(ClientRow.federation_id == bindparam("federation"), ClientRow.name == bindparam("client"))
    .values(refusals=ClientRow.refusals + 1, last_refusal=bindparam("about"))
)
_PHASES = _updated(PhaseRow, PhaseRow.id)
_FEDERATIONS = _updated(FederationRow, FederationRow.id)


def _keep_blobs(dialect: Callable[[Any], Any]) -> Insert:
    """Insert blobs; one that is there already stays as it is, unless its bytes are damaged: then these mend it."""
    statement = dialect(BlobRow.__table__)
    new = statement.excluded.content
    kept: Insert = statement.on_conflict_do_update(
        index_elements=["digest"], set_={"content": new}, where=BlobRow.content != new
    )
    return kept


def _keep_objects(dialect: Callable[[Any], Any]) -> Insert:
    """Insert objects' keys. Bytes that are there already were put once more: the newer key is known to be whole."""
    statement = dialect(ObjectRow.__table__)
    kept: Insert = statement.on_conflict_do_update(index_elements=["digest"], set_={"key": statement.excluded.key})
    return kept


_OBJECTS = {"sqlite": _keep_objects(sqlite.insert), "postgresql": _keep_objects(postgresql.insert)}
_BLOBS = {"sqlite": _keep_blobs(sqlite.insert), "postgresql": _keep_blobs(postgresql.insert)}


class Batch:
    """Rows that wait to be written, by table; none is in the database before ``write``."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.objects: dict[str, str] = {}  # keys by digest
        self.superseded: list[str] = []  # keys whose bytes have another one, for removal after the commit
        self.updates: list[Row] = []
        self.evaluations: list[Row] = []
        self.exchanges: list[Row] = []
        self.events: list[Row] = []
        self.clients: list[Row] = []
        self.tokens: dict[str, int] = {}  # by digest: how often each has been used
        self.audit: list[Row] = []
        self.states: list[Row] = []
        self.tasks: dict[str, Row] = {}  # by id
        self.federations: defaultdict[str, Row] = defaultdict(dict)  # changed columns, by id
        self.phases: defaultdict[int, Row] = defaultdict(dict)  # the same
        self._settled: list[Row] = []
        self._served: list[Row] = []
        self._counted: list[Row] = []
        self._refused: list[Row] = []

    def refuse(self, federation: str, client: str, about: Row) -> None:
        """A request of this client was refused."""
        self._refused.append({"federation": federation, "client": client, "about": about})

    def settle(self, task_id: str, status: str) -> None:
        """A task is over."""
        self._settled.append({"key": task_id, "status": status})

    def serve(self, payloads: Mapping[str, tuple[str, int]]) -> None:
        """Tasks have payloads: digest and size, by task id."""
        for id, (digest, size) in payloads.items():
            served = {"payload_sha256": digest, "payload_bytes": size, "payload_stored": True}
            if id in self.tasks:
                self.tasks[id].update(served)
            else:
                self._served.append({"key": id, **served})

    def count(self, weights: Mapping[str, float | None]) -> None:
        """Tasks count, with their weights, by task id."""
        self._counted += [{"key": id, "counted": True, "weight": weight} for id, weight in weights.items()]

    def write(self, session: Session) -> None:
        """Write all rows, after the session's own, which they may refer to."""
        session.flush()
        connection = session.connection()
        if self.objects:
            known = select(ObjectRow.key).where(ObjectRow.digest.in_(self.objects)).order_by(ObjectRow.digest)
            self.superseded += session.scalars(known.with_for_update())
        with together(connection):
            self._write(connection)
        for waiting in (self.blobs, self.objects, self.tokens, self.tasks, self.federations, self.phases):
            waiting.clear()

    def _write(self, connection: Connection) -> None:
        if self.blobs:
            rows = [{"digest": digest, "content": content} for digest, content in sorted(self.blobs.items())]
            connection.execute(_BLOBS[connection.dialect.name], rows)
            point("blob-row-written")
        if self.objects:
            keys = [{"digest": digest, "key": self.objects[digest]} for digest in sorted(self.objects)]
            connection.execute(_OBJECTS[connection.dialect.name], keys)
        for changed, by_key in ((_FEDERATIONS, self.federations), (_PHASES, self.phases)):
            for key, columns in by_key.items():
                connection.execute(changed, {"key": key, **columns})
        for statement, waiting in (
            (_inserted(ClientRow), self.clients),
            (_TOKENS, [{"key": digest, "used": times} for digest, times in self.tokens.items()]),
            (_REFUSED, self._refused),
            (_inserted(AuditRow), self.audit),
            (_inserted(StateRow).inline(), self.states),  # nobody asks for the numbers of these
            (_inserted(TaskRow), list(self.tasks.values())),
            (_TASKS, self._served),
            (_TASKS, self._settled),
            (_TASKS, self._counted),
            (_inserted(UpdateRow), self.updates),
            (_inserted(EvaluationRow), self.evaluations),
            (_inserted(ExchangeRow), self.exchanges),
            (_inserted(EventRow).inline(), self.events),
        ):
            if waiting:
                connection.execute(statement, waiting)
                waiting.clear()


def insert_phase(session: Session, row: Row) -> int:
    """Insert a phase; its id."""
    key = session.connection().execute(_inserted(PhaseRow), row).inserted_primary_key
    assert key is not None, "one row was inserted"
    return int(key[0])


@cache
def _inserted(table: type[Base]) -> Insert:
    return insert(table.__table__)  # type: ignore[arg-type]
