"""Alembic's entry point: the connection comes from ``Database.migrate``."""

from __future__ import annotations

from alembic import context

from promptfed.coordinator.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
