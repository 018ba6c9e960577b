"""The tables. A run's rows are written in the transaction of the event that changed it, so they hold complete steps.

Times are RFC 3339 text in UTC, for people only (deadlines use a monotonic clock). On every database text is compared
by code point and whole numbers have 64 bits.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import DDL, JSON, BigInteger, ForeignKey, Index, Integer, MetaData, String, UniqueConstraint, event
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
Json = JSON(none_as_null=True)
NOT_JSON = "what is stored is not JSON"
Text = String().with_variant(String(collation="C"), "postgresql")

# SQLite's INTEGER has 64 bits, and only a column of just this type numbers its rows.
Whole = BigInteger().with_variant(Integer(), "sqlite")

DELETING = "deleting"
"""The state of a hidden federation while its rows are being deleted."""

# Tensors hardly compress, and PostgreSQL would try it with each of them.
_UNCOMPRESSED = DDL("ALTER TABLE blobs ALTER COLUMN content SET STORAGE EXTERNAL")  # type: ignore[no-untyped-call]


class Lenient(TypeDecorator[Any]):
    """JSON as a report reads it: what is damaged comes as the text `NOT_JSON`, beside rows that are whole."""

    impl = JSON
    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        """As JSON's own."""
        whole = super().result_processor(dialect, coltype)

        def read(stored: Any) -> Any:
            try:
                return whole(stored) if whole is not None else stored
            except ValueError:
                return NOT_JSON

        return read


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own form)
        dict[str, Any]: Json,
        list[str]: Json,
        str: Text,
        int: Whole,
    }


class StoreRow(Base):
    """One row: the name that the data folder and its database share."""

    __tablename__ = "store"

    id: Mapped[str] = mapped_column(primary_key=True)


class FederationRow(Base):
    """One federation: its resolved spec and the state of its run."""

    __tablename__ = "federations"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    request_digest: Mapped[str]
    created_at: Mapped[str]
    started_at: Mapped[str | None]
    ended_at: Mapped[str | None]
    state: Mapped[str]
    reason: Mapped[str | None]
    round: Mapped[int]
    step: Mapped[int]
    work: Mapped[str | None]
    joining: Mapped[list[str]]
    fingerprint: Mapped[str | None]
    shape: Mapped[dict[str, Any] | None]
    supplied_state: Mapped[str | None]
    draw_secret: Mapped[str | None]
    sampling_key: Mapped[str | None]
    budget_rounds: Mapped[int | None]


class TokenRow(Base):
    """An enrolment token, as the SHA-256 of its text.

    ``client`` is the one reset name that it is for; ``closed`` says that nobody new comes in by it any more.
    ``expired_at``: when it was first seen to have expired, from where on it stays so.
    """

    __tablename__ = "enrolment_tokens"
    __table_args__ = (UniqueConstraint("federation_id", "name"),)

    digest: Mapped[str] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[str]
    expires_at: Mapped[str]
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    role: Mapped[str | None]
    uses: Mapped[int]
    used: Mapped[int]
    client: Mapped[str | None]
    closed: Mapped[bool]
    expired_at: Mapped[str | None]


class OperatorRow(Base):
    """An operator's token, as the SHA-256 of its text. ``expired_at``: as an enrolment token's."""

    __tablename__ = "operator_tokens"

    digest: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str] = mapped_column(index=True)
    role: Mapped[str]
    created_at: Mapped[str]
    expires_at: Mapped[str]
    expired_at: Mapped[str | None]


class AuditRow(Base):
    """One entry of the audit log. It has no foreign key to its federation: entries stay when that is deleted."""

    __tablename__ = "audit_log"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[str]
    actor: Mapped[str]
    role: Mapped[str]
    address: Mapped[str]
    act: Mapped[str]
    federation: Mapped[str | None] = mapped_column(index=True)
    federation_name: Mapped[str | None]
    detail: Mapped[dict[str, Any]]
    previous: Mapped[str]
    hash: Mapped[str]


class ClientRow(Base):
    """An enrolled client; ``secret_digest`` is null after the operator has reset its name.

    ``token_id`` is that of the enrolment token that it came with, which may be deleted since. ``protection``: how it
    will train under differential privacy, by its own word (`EnrolledProtection`). ``software``: its
    release of promptfed, its system, and how it reads grey pictures of more than 8 bits.
    """

    __tablename__ = "clients"
    __table_args__ = (UniqueConstraint("federation_id", "name"), UniqueConstraint("federation_id", "secret_digest"))

    id: Mapped[str] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"))
    name: Mapped[str]
    role: Mapped[str]
    secret_digest: Mapped[str | None]
    num_samples: Mapped[int]
    class_names: Mapped[list[str]]
    domain: Mapped[dict[str, Any] | None]
    device: Mapped[str]
    software: Mapped[dict[str, Any] | None]
    active: Mapped[bool]
    joined: Mapped[bool]
    enrolled_at: Mapped[str]
    last_seen: Mapped[str | None]
    refusals: Mapped[int]
    token_id: Mapped[str | None]
    last_refusal: Mapped[dict[str, Any] | None]
    identity_key: Mapped[str | None]
    protection: Mapped[dict[str, Any] | None]


class PhaseRow(Base):
    """A stage of a run: a phase of a round, or its evaluation (the step after the last phase).

    ``expected``: K̄, by which noised sums are divided. ``noise_key``: what the noise of this phase follows from, in
    hex; written as it closes, never told, and gone with its updates.
    """

    __tablename__ = "phases"
    __table_args__ = (UniqueConstraint("federation_id", "round", "step"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"))
    round: Mapped[int]
    step: Mapped[int]
    kind: Mapped[str]
    name: Mapped[str]
    sample_size: Mapped[int]
    extended: Mapped[bool]
    opened_at: Mapped[str]
    deadline: Mapped[str]
    closed_at: Mapped[str | None]
    completed_at: Mapped[str | None]
    measured: Mapped[dict[str, Any] | None]
    expected: Mapped[float | None]
    noise_key: Mapped[str | None]


class TaskRow(Base):
    """One client's part of a stage. A client that is asked again after a failure gets a new task."""

    __tablename__ = "tasks"

    id: Mapped[str] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"), index=True)
    phase_id: Mapped[int] = mapped_column(ForeignKey("phases.id", ondelete="CASCADE"), index=True)
    number: Mapped[int]
    client: Mapped[str]
    status: Mapped[str]
    opened_at: Mapped[str]
    payload_sha256: Mapped[str | None] = mapped_column(index=True)
    payload_bytes: Mapped[int | None]
    payload_stored: Mapped[bool]
    bytes_down: Mapped[int]
    failure: Mapped[dict[str, Any] | None]
    counted: Mapped[bool]
    weight: Mapped[float | None]


class UpdateRow(Base):
    """The one accepted update of a task. ``stored`` is false once retention has removed its bytes.

    ``metrics``: the client's own numbers. ``spent``: what it cost the client's privacy budget (`spent_by`). ``judged``:
    what the aggregation rule made of it (``rules.Judged``), where it is not the plain mean. ``sent``: the digest of the
    compressed body; ``sha256`` is then that of the decompressed one, which is stored.
    """

    __tablename__ = "updates"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    sha256: Mapped[str] = mapped_column(index=True)
    bytes: Mapped[int]
    norm: Mapped[float]
    metrics: Mapped[dict[str, Any]]
    received_at: Mapped[str]
    stored: Mapped[bool]
    spent: Mapped[dict[str, Any] | None]
    judged: Mapped[dict[str, Any] | None]
    sent: Mapped[str | None]


class EvaluationRow(Base):
    """The one accepted evaluation of a task."""

    __tablename__ = "evaluations"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str]
    body: Mapped[dict[str, Any]]
    received_at: Mapped[str]


class ExchangeRow(Base):
    """The one accepted answer to a step of a secure sum. ``body`` goes once the sum is committed; the digest stays.

    ``spent``: of a masked vector what it cost its client's privacy budget; null for other steps.
    """

    __tablename__ = "exchanges"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str]
    body: Mapped[bytes | None]
    bytes: Mapped[int]
    received_at: Mapped[str]
    spent: Mapped[dict[str, Any] | None]


class SumRow(Base):
    """A secure sum of ``count`` clients: ``body`` is Σ x, ``(d,)`` little-endian int64; ``weight`` is Σ a."""

    __tablename__ = "sums"

    phase_id: Mapped[int] = mapped_column(
        ForeignKey("phases.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    sha256: Mapped[str]
    body: Mapped[bytes]
    count: Mapped[int]
    weight: Mapped[float]


class StateRow(Base):
    """A global state: after a phase, a joining, or the start (round 0). The last row is the current one.

    That ``phase_id`` is unique is what makes the database itself refuse to aggregate a phase twice.
    """

    __tablename__ = "states"
    __table_args__ = (Index("ix_states_federation_id_round", "federation_id", "round"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"))
    round: Mapped[int]
    phase_id: Mapped[int | None] = mapped_column(ForeignKey("phases.id", ondelete="CASCADE"), unique=True)
    origin: Mapped[str]
    state_hash: Mapped[str]
    sha256: Mapped[str] = mapped_column(index=True)
    bytes: Mapped[int]
    stored: Mapped[bool]


class EventRow(Base):
    """One event of the event stream, by the stream's id."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_federation_id_id", "federation_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    federation_id: Mapped[str] = mapped_column(ForeignKey("federations.id", ondelete="CASCADE"))
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]
    at: Mapped[str]


class BlobRow(Base):
    """A small blob, under the digest of its content; larger ones are files (``blobs``)."""

    __tablename__ = "blobs"

    digest: Mapped[str] = mapped_column(primary_key=True)
    content: Mapped[bytes]


event.listen(BlobRow.__table__, "after_create", _UNCOMPRESSED.execute_if(dialect="postgresql"))


class ObjectRow(Base):
    """A large blob in an object store, by the digest of its content. No key is used twice: whoever was about to remove
    an object cannot harm one that was put since.
    """

    __tablename__ = "objects"

    digest: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)


class WorkingRow(Base):
    """Which of several coordinators works on this database, in one row (``id`` 1): where it is reached, and when it
    was seen last. It only says whom to look for and whose session to terminate: the session's lock excludes others.

    ``since``, ``seen``: seconds of the epoch by the database's clock. ``backend``: the process id of its writing
    session there.
    """

    __tablename__ = "working"

    id: Mapped[int] = mapped_column(primary_key=True)
    holder: Mapped[str]
    address: Mapped[str]
    backend: Mapped[int]
    since: Mapped[float]
    seen: Mapped[float]
