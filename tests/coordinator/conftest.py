"""A coordinator per test, on SQLite, or on both databases where the test is marked so.

After every committed change the database must hold just what memory holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import recovery
from promptfed.coordinator.engine.recorder import Changes
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.tables import FederationRow
from tests.support.coordinators import InProcess, InThread, Make, in_process, in_thread
from tests.support.object_store import NoObjectStore, ObjectStoreServer
from tests.support.postgres import NoServer, PostgresServer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``both_databases`` runs on each; on PostgreSQL in the first tier where it says ``first=True``."""
    if mark := metafunc.definition.get_closest_marker("both_databases"):
        marks = () if mark.kwargs.get("first") else pytest.mark.extended
        metafunc.parametrize("database", ["sqlite", pytest.param("postgresql", marks=marks)], indirect=True)


def without_deadline(live: Federation) -> dict[str, Any]:
    """What of a federation must be the same after a restart."""
    stage = replace(live.run.stage, deadline=0.0) if live.run.stage is not None else None
    kept = ("fingerprint", "shape", "supplied_state", "clients", "by_secret", "tasks", "tokens", "deadline")
    kept += ("draw_secret", "sampling_key")
    return {"run": replace(live.run, stage=stage), **{name: getattr(live, name) for name in kept}}


@pytest.fixture(autouse=True)
def memory_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each change: what a restart would load is what is in memory."""
    changes = Registry.changes
    wrong: list[str] = []

    @contextmanager
    def checked(self: Registry) -> Iterator[Changes]:
        with self.exclusively():
            with changes(self) as some:
                yield some
            for id in some.by_id:
                with self.database.read() as session:
                    loaded = recovery.load(session, session.get_one(FederationRow, id), 0.0)
                stored, held = without_deadline(loaded), without_deadline(self.federations[id])
                different = [key for key in held if stored[key] != held[key]]
                wrong.extend(f"{key}: {stored[key]} is stored, {held[key]} is held" for key in different)

    monkeypatch.setattr(Registry, "changes", checked)
    yield
    assert wrong == []


@pytest.fixture
def blobs_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are: those of tests are small."""
    monkeypatch.setattr(blobs, "SMALL_BYTES", -1)


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[InThread, float], None]:
    """Moves a coordinator's clock forward, so that no test waits for a deadline."""
    ahead = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time.monotonic() + ahead[0])

    def forward(coordinator: InThread, seconds: float) -> None:
        ahead[0] += seconds
        coordinator.registry.wake([])

    return forward


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, started when the first test asks for it."""
    try:
        server = PostgresServer()
    except NoServer as error:
        pytest.skip(f"tests on PostgreSQL: {error}")
    yield server
    server.remove()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStoreServer]:
    """A server of objects, started when the first test asks for it."""
    try:
        server = ObjectStoreServer()
    except NoObjectStore as error:
        pytest.skip(f"tests on an object store: {error}")
    yield server
    server.stop()


@pytest.fixture
def object_store(object_server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a fresh prefix, to which the environment has the way."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_server.bucket()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings that name this test's database."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return {}
    server: PostgresServer = request.getfixturevalue("postgres")
    return {"database_url": server.schema()}


@pytest.fixture
def coordinator(tmp_path: Path, database: dict[str, Any]) -> Iterator[InProcess]:
    """A coordinator with the default settings."""
    with in_process(tmp_path / "data", **database) as server:
        yield server


@pytest.fixture
def served(tmp_path: Path, database: dict[str, Any]) -> Iterator[InThread]:
    """The same on a real socket: a module that needs one returns it from a `coordinator` fixture of its own."""
    with in_thread(tmp_path / "data", **database) as server:
        yield server


@pytest.fixture
def coordinator_with(tmp_path: Path, database: dict[str, Any]) -> Iterator[Make]:
    """Coordinators with settings of their own, all in one data folder and on one database."""
    servers: list[InThread] = []

    def make(**options: Any) -> InThread:
        servers.append(InThread(tmp_path / "data", **(database | options)))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
