"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite gets just VARCHAR and INTEGER.
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """To this version."""
    _create_federations()
    _create_clients()
    _create_rounds()
    _create_tasks()
    _create_answers()


def _create_federations() -> None:
    op.create_table(
        "federations",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("idempotency_key", TEXT, nullable=True),
        sa.Column("request_digest", TEXT, nullable=False),
        sa.Column("created_at", TEXT, nullable=False),
        sa.Column("started_at", TEXT, nullable=True),
        sa.Column("ended_at", TEXT, nullable=True),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=True),
        sa.Column("round", WHOLE, nullable=False),
        sa.Column("step", WHOLE, nullable=False),
        sa.Column("work", TEXT, nullable=True),
        sa.Column("joining", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("fingerprint", TEXT, nullable=True),
        sa.Column("shape", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("supplied_state", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_federations")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_federations_idempotency_key")),
        sa.UniqueConstraint("name", name=op.f("uq_federations_name")),
    )
    op.create_table(
        "events",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("at", TEXT, nullable=False),
        _reference("events", "federation_id", "federations"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_federation_id_id", ["federation_id", "id"], unique=False)


def _create_clients() -> None:
    op.create_table(
        "clients",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("role", TEXT, nullable=False),
        sa.Column("secret_digest", TEXT, nullable=True),
        sa.Column("num_samples", WHOLE, nullable=False),
        sa.Column("class_names", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("domain", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("device", TEXT, nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("joined", sa.Boolean(), nullable=False),
        sa.Column("enrolled_at", TEXT, nullable=False),
        sa.Column("last_seen", TEXT, nullable=True),
        sa.Column("refusals", WHOLE, nullable=False),
        sa.Column("last_refusal", sa.JSON(none_as_null=True), nullable=True),
        _reference("clients", "federation_id", "federations"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clients")),
        sa.UniqueConstraint("federation_id", "name", name=op.f("uq_clients_federation_id_name")),
        sa.UniqueConstraint("federation_id", "secret_digest", name=op.f("uq_clients_federation_id_secret_digest")),
    )
    op.create_table(
        "enrolment_tokens",
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("created_at", TEXT, nullable=False),
        sa.Column("expires_at", TEXT, nullable=False),
        _reference("enrolment_tokens", "federation_id", "federations"),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_enrolment_tokens")),
    )
    with op.batch_alter_table("enrolment_tokens", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_enrolment_tokens_federation_id"), ["federation_id"], unique=False)


def _create_rounds() -> None:
    op.create_table(
        "phases",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("round", WHOLE, nullable=False),
        sa.Column("step", WHOLE, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("sample_size", WHOLE, nullable=False),
        sa.Column("extended", sa.Boolean(), nullable=False),
        sa.Column("opened_at", TEXT, nullable=False),
        sa.Column("deadline", TEXT, nullable=False),
        sa.Column("closed_at", TEXT, nullable=True),
        sa.Column("completed_at", TEXT, nullable=True),
        _reference("phases", "federation_id", "federations"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_phases")),
        sa.UniqueConstraint("federation_id", "round", "step", name=op.f("uq_phases_federation_id_round_step")),
    )
    op.create_table(
        "states",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("round", WHOLE, nullable=False),
        sa.Column("phase_id", WHOLE, nullable=True),
        sa.Column("origin", TEXT, nullable=False),
        sa.Column("state_hash", TEXT, nullable=False),
        sa.Column("sha256", TEXT, nullable=False),
        sa.Column("bytes", WHOLE, nullable=False),
        sa.Column("committed_at", TEXT, nullable=False),
        sa.Column("stored", sa.Boolean(), nullable=False),
        _reference("states", "federation_id", "federations"),
        _reference("states", "phase_id", "phases"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_states")),
        sa.UniqueConstraint("phase_id", name=op.f("uq_states_phase_id")),
    )
    with op.batch_alter_table("states", schema=None) as batch_op:
        batch_op.create_index("ix_states_federation_id_round", ["federation_id", "round"], unique=False)
        batch_op.create_index(batch_op.f("ix_states_sha256"), ["sha256"], unique=False)


def _create_tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("federation_id", TEXT, nullable=False),
        sa.Column("phase_id", WHOLE, nullable=False),
        sa.Column("number", WHOLE, nullable=False),
        sa.Column("client", TEXT, nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("opened_at", TEXT, nullable=False),
        sa.Column("settled_at", TEXT, nullable=True),
        sa.Column("payload_sha256", TEXT, nullable=True),
        sa.Column("payload_bytes", WHOLE, nullable=True),
        sa.Column("payload_stored", sa.Boolean(), nullable=False),
        sa.Column("bytes_down", WHOLE, nullable=False),
        sa.Column("failure", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=True),
        _reference("tasks", "federation_id", "federations"),
        _reference("tasks", "phase_id", "phases"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
    )
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tasks_federation_id"), ["federation_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_tasks_payload_sha256"), ["payload_sha256"], unique=False)
        batch_op.create_index(batch_op.f("ix_tasks_phase_id"), ["phase_id"], unique=False)


def _create_answers() -> None:
    op.create_table(
        "evaluations",
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("received_at", TEXT, nullable=False),
        _reference("evaluations", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "updates",
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("sha256", TEXT, nullable=False),
        sa.Column("bytes", WHOLE, nullable=False),
        sa.Column("norm", sa.Double(), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("received_at", TEXT, nullable=False),
        sa.Column("stored", sa.Boolean(), nullable=False),
        _reference("updates", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_updates")),
    )
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_updates_sha256"), ["sha256"], unique=False)


def _reference(table: str, column: str, referenced: str) -> sa.ForeignKeyConstraint:
    """Rows of ``table`` go with the row of ``referenced`` that their ``column`` names."""
    return sa.ForeignKeyConstraint(
        [column], [f"{referenced}.id"], name=op.f(f"fk_{table}_{column}"), ondelete="CASCADE"
    )


def downgrade() -> None:
    """Back from it."""
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_updates_sha256"))

    op.drop_table("updates")
    op.drop_table("evaluations")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_tasks_phase_id"))
        batch_op.drop_index(batch_op.f("ix_tasks_payload_sha256"))
        batch_op.drop_index(batch_op.f("ix_tasks_federation_id"))

    op.drop_table("tasks")
    with op.batch_alter_table("states", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_states_sha256"))
        batch_op.drop_index("ix_states_federation_id_round")

    op.drop_table("states")
    op.drop_table("phases")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_federation_id_id")

    op.drop_table("events")
    with op.batch_alter_table("enrolment_tokens", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_enrolment_tokens_federation_id"))

    op.drop_table("enrolment_tokens")
    op.drop_table("clients")
    op.drop_table("federations")
