"""Queries that several parts of the coordinator share, and rows written in batches. ``id`` is a federation's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from statistics import fmean
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection, Select, bindparam, insert, select, type_coerce, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.dml import Insert, Update

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
    Lenient,
    ObjectRow,
    PhaseRow,
    StateRow,
    TaskRow,
    TokenRow,
    UpdateRow,
)
from promptfed.shared.messages import EvaluationRequest
from promptfed.shared.privacy.accounting import Event
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import SelectionSpec

T = TypeVar("T", bound=Base)
LAST_STATE = (
    select(StateRow.sha256)
    .where(StateRow.federation_id == bindparam("id"))
    .order_by(StateRow.round.desc(), StateRow.id.desc())
    .limit(1)
)
"""The digest of the state that was committed last, of the federation ``id``."""

Row = dict[str, Any]
_REFUSED = (
    update(ClientRow.__table__)  # type: ignore[arg-type]
    .where(ClientRow.federation_id == bindparam("federation"), ClientRow.name == bindparam("client"))
    .values(refusals=ClientRow.refusals + 1, last_refusal=bindparam("about"))
)


def page(
    session: Session, query: Select[T], column: InstrumentedAttribute[str], limit: int, after: str | None
) -> tuple[list[T], str | None]:
    """At most ``limit`` rows in order of ``column``, from behind ``after``; the last one's value if more follow."""
    if after is not None:
        query = query.where(column > after)
    rows = list(session.scalars(query.order_by(column).limit(limit + 1)))
    following = getattr(rows[limit - 1], column.key) if len(rows) > limit else None
    return rows[:limit], following


def clients(id: str) -> Select[ClientRow]:
    """The clients."""
    return select(ClientRow).where(ClientRow.federation_id == id)


def client(session: Session, id: str, name: str) -> ClientRow:
    """The client with this name."""
    return session.scalars(clients(id).where(ClientRow.name == name)).one()


def states(id: str) -> Select[StateRow]:
    """The states, in the order in which they were committed."""
    return select(StateRow).where(StateRow.federation_id == id).order_by(StateRow.id)


def last_state(session: Session, id: str, *where: Any) -> StateRow | None:
    """The state that was committed last, of those that fulfil the conditions."""
    query = select(StateRow).where(StateRow.federation_id == id, *where)
    # Rounds only go forward. By id alone a database would read all states: the index has the round.
    return session.scalars(query.order_by(StateRow.round.desc(), StateRow.id.desc()).limit(1)).one_or_none()


def phase_at(session: Session, id: str, round: int, step: int) -> PhaseRow | None:
    """The phase at ``step`` of ``round``, if it has begun."""
    here = (PhaseRow.federation_id == id, PhaseRow.round == round, PhaseRow.step == step)
    return session.scalars(select(PhaseRow).where(*here)).one_or_none()


def tasks_with_phases(id: str) -> Select[TaskRow, PhaseRow]:
    """The tasks, each with its phase."""
    joined = select(TaskRow, PhaseRow).join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
    return joined.where(TaskRow.federation_id == id, PhaseRow.federation_id == id)


def counted_clients(session: Session, id: str, round: int, step: int) -> tuple[str, ...]:
    """The clients whose answers to the closed phase at ``step`` of ``round`` count, in order of name."""
    here = (PhaseRow.round == round, PhaseRow.step == step, TaskRow.counted)
    query = tasks_with_phases(id).with_only_columns(TaskRow.client).where(*here)
    return tuple(session.scalars(query.order_by(TaskRow.client)))


def means_by_round(session: Session, id: str, phase: str, selection: SelectionSpec) -> dict[int, float]:
    """By round, the mean of the clients' figures in the evaluations called ``phase`` that a selection looks at."""
    figures: dict[int, list[float]] = {}
    answered = (PhaseRow.kind == "evaluate", PhaseRow.name == phase, TaskRow.status == "answered")
    query = tasks_with_phases(id).join(EvaluationRow, EvaluationRow.task_id == TaskRow.id).where(*answered)
    columns = query.with_only_columns(PhaseRow.round, type_coerce(EvaluationRow.body, Lenient()))
    for round, body in session.execute(columns.order_by(PhaseRow.round, TaskRow.client)):
        try:
            value = EvaluationRequest.model_validate(body).splits.get(selection.split)
        except ValidationError:
            continue  # the round's report names it
        figure = None if value is None else getattr(value, selection.metric)
        if figure is not None:
            figures.setdefault(round, []).append(figure)
    return {round: fmean(values) for round, values in figures.items()}


def spent_events(session: Session, id: str, client: str) -> list[Event]:
    """What each release of a client has cost so far; one that cannot be read is left out."""
    events = []
    for table in (UpdateRow, ExchangeRow):
        joined = select(type_coerce(table.spent, Lenient())).join(TaskRow, TaskRow.id == table.task_id)
        mine = joined.where(TaskRow.federation_id == id, TaskRow.client == client, table.spent.is_not(None))
        for spent in session.scalars(mine):
            with suppress(ValueError, TypeError, LookupError):
                events.append(Event(**spent["event"]))
    return events


def _updated(table: type[Base], key: Any) -> Update:
    """Update rows by their ``key``; the parameters' other names are those of the columns to set."""
    return update(table.__table__).where(key == bindparam("key"))  # type: ignore[arg-type]


_TASKS = _updated(TaskRow, TaskRow.id)
_TOKENS = _updated(TokenRow, TokenRow.digest)
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
            keys = select(ObjectRow.key).where(ObjectRow.digest.in_(self.objects)).order_by(ObjectRow.digest)
            self.superseded += session.scalars(keys.with_for_update())
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
