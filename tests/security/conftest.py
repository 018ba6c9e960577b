"""The coordinators of the coordinator's own tests."""

from tests.coordinator.conftest import coordinator, coordinator_with, database, postgres, pytest_generate_tests, served

__all__ = ["coordinator", "coordinator_with", "database", "postgres", "pytest_generate_tests", "served"]
