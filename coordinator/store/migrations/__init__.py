"""Alembic migrations, run at every start on tables of an earlier version."""
