"""The databases of the coordinator's own tests."""

from tests.coordinator.conftest import coordinator, database, leap, postgres, pytest_generate_tests

__all__ = ["coordinator", "database", "leap", "postgres", "pytest_generate_tests"]
