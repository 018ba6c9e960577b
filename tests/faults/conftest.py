"""The databases of the coordinator's own tests."""

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

__all__ = [
    "blobs_are_files",
    "coordinator",
    "database",
    "leap",
    "object_server",
    "object_store",
    "postgres",
    "pytest_generate_tests",
]
