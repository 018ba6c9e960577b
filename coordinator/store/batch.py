"""Rows that a transaction writes together: one statement for each table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import Insert

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
    ObjectRow,
    TaskRow,
    TokenRow,
    UpdateRow,
)

Row = dict[str, Any]

_SETTLE = (
    update(TaskRow.__table__)  # type: ignore[arg-type]
    .where(TaskRow.id == bindparam("key"))
    .values(status=bindparam("to"), settled_at=bindparam("at"))
)
_USE = update(TokenRow.__table__).where(TokenRow.digest == bindparam("key")).values(used=bindparam("times"))  # type: ignore[arg-type]


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
_SERVE = (
    update(TaskRow.__table__)  # type: ignore[arg-type]
    .where(TaskRow.id == bindparam("key"))
    .values(payload_sha256=bindparam("digest"), payload_bytes=bindparam("size"), payload_stored=True)
)
_COUNT = (
    update(TaskRow.__table__)  # type: ignore[arg-type]
    .where(TaskRow.id == bindparam("key"))
    .values(counted=True, weight=bindparam("share"))
)


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
        self._settled: list[Row] = []

    def settle(self, task_id: str, status: str, at: str) -> None:
        """A task is over."""
        self._settled.append({"key": task_id, "to": status, "at": at})

    def write(self, session: Session) -> None:
        """Write all rows, after the session's own, which they may refer to."""
        session.flush()
        connection = session.connection()
        if self.objects:
            known = select(ObjectRow.key).where(ObjectRow.digest.in_(self.objects)).order_by(ObjectRow.digest)
            self.superseded += session.scalars(known.with_for_update())
        with together(connection):
            self._write(connection)
        self.blobs.clear()
        self.objects.clear()
        self.tokens.clear()

    def _write(self, connection: Connection) -> None:
        if self.blobs:
            rows = [{"digest": digest, "content": content} for digest, content in sorted(self.blobs.items())]
            connection.execute(_BLOBS[connection.dialect.name], rows)
            point("blob-row-written")
        if self.objects:
            keys = [{"digest": digest, "key": self.objects[digest]} for digest in sorted(self.objects)]
            connection.execute(_OBJECTS[connection.dialect.name], keys)
        for statement, waiting in (
            (_inserted(ClientRow), self.clients),
            (_USE, [{"key": digest, "times": times} for digest, times in self.tokens.items()]),
            (_inserted(AuditRow), self.audit),
            (_SETTLE, self._settled),
            (_inserted(UpdateRow), self.updates),
            (_inserted(EvaluationRow), self.evaluations),
            (_inserted(ExchangeRow), self.exchanges),
            (_inserted(EventRow).inline(), self.events),  # nobody asks for their numbers
        ):
            if waiting:
                connection.execute(statement, waiting)
                waiting.clear()


@cache
def _inserted(table: type[Base]) -> Insert:
    return insert(table.__table__)  # type: ignore[arg-type]


def insert_tasks(session: Session, rows: list[Row]) -> None:
    """Insert tasks with one statement. The session must not hold any of them as objects."""
    if rows:
        session.connection().execute(_inserted(TaskRow), rows)


def serve_tasks(session: Session, payloads: Mapping[str, tuple[str, int]]) -> None:
    """Store digest and size of each task's payload, by task id. The session must not hold these tasks as objects."""
    if payloads:
        rows = [{"key": id, "digest": digest, "size": size} for id, (digest, size) in payloads.items()]
        session.connection().execute(_SERVE, rows)


def count_tasks(session: Session, weights: Mapping[str, float | None]) -> None:
    """Store that tasks count, and their weights, by task id. The session must not hold these tasks as objects."""
    if weights:
        session.connection().execute(_COUNT, [{"key": id, "share": weight} for id, weight in weights.items()])
