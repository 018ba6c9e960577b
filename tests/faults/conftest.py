"""The databases of the coordinator's own tests, and three coordinators on one of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.conftest import (
    blobs_are_files,
    coordinator,
    database,
    leap,
    object_server,
    object_store,
    postgres,
    pytest_generate_tests,
)
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.takeovers import Group

__all__ = [
    "blobs_are_files", "coordinator", "database", "leap", "object_server", "object_store", "postgres",
    "pytest_generate_tests",
]  # fmt: skip


@pytest.fixture
def group(
    tmp_path: Path, postgres: PostgresServer, object_store: str, object_server: ObjectStoreServer
) -> Iterator[Group]:
    made = Group(tmp_path, postgres.schema(), object_store, dict(object_server.environment))
    yield made
    made.close()
