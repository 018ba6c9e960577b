"""Kill -9 inside a group of answers: whoever was told 201 counts, whoever was told nothing is asked for it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.testing.clients import ScriptedClient, drive
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.groups import GATHER, at_once, updates_of
from tests.support.kill_campaign import FILES
from tests.support.postgres import PostgresServer

NAMES = ("a", "b", "c", "d", "e", "f")
BEFORE = ("update-checked", "update-entered", "group-stepped", "blob-row-written", "group-before-commit")
AFTER = ("group-committed", "answer-sent")


def begin(api: OperatorCalls) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    federation = api.create(name="eyes", rounds=1)
    clients = api.enrol(federation, *NAMES)
    api.post(f"{federation}/start")
    return federation, clients, api.training(clients)


def hashes(api: OperatorCalls, federation: str) -> list[str]:
    api.until(federation, state="finished")
    return [one["state_hash"] for one in api.get(f"{federation}/rounds")["rounds"]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with in_thread(tmp_path_factory.mktemp("undisturbed") / "data") as api:
        federation, clients, _ = begin(api)
        drive(clients)
        return hashes(api, federation)


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(f"{name}:{count}", marks=pytest.mark.slow) for name in BEFORE[:2] for count in (1, 4)),
        *(pytest.param(f"{name}:1", marks=pytest.mark.slow) for name in (*BEFORE[2:4], "group-committed")),
        "group-before-commit:1",
        *(pytest.param(f"answer-sent:{count}", marks=pytest.mark.slow) for count in (1, 3)),
        pytest.param("files blob-written:4", marks=pytest.mark.slow),
        pytest.param("files blob-renamed:2", marks=pytest.mark.slow),
    ],
)
def test_killed_inside_a_group_nothing_that_was_told_is_lost_and_nothing_counts_twice(
    fault: str, expected: list[str], tmp_path: Path, database: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres") if database else None
    options = ["--database-url", server.schema()] if server else []
    files, point = fault.startswith("files "), fault.removeprefix("files ")
    constants = GATHER | (FILES if files else {})
    process = ForkedCoordinator(tmp_path / "data", *options, constants=constants)
    try:
        federation, clients, tasks = begin(process)
        bodies = updates_of(clients, tasks)
        restart(process, clients, point)
        told = send_all(clients, tasks, bodies)
        assert process.wait() == -9
        restart(process, clients, "")
        again = send_all(clients, tasks, bodies)
        assert set(told) <= {None, 201}
        assert all(status == 200 for first, status in zip(told, again, strict=True) if first == 201)
        stored = point.split(":")[0] in AFTER
        assert again == [200 if stored else 201] * len(NAMES), "the group was stored as a whole, or not at all"
        if point == "answer-sent:3":
            assert told.count(201) >= 1, "some were told before it died"
        drive(clients)
        assert hashes(process, federation) == expected
    finally:
        process.kill()


def restart(process: ForkedCoordinator, clients: list[ScriptedClient], fault: str) -> None:
    process.kill()
    process.start(fault)
    for client in clients:
        client.http = process.http


def send_all(clients: list[ScriptedClient], tasks: list[dict[str, Any]], bodies: list[bytes]) -> list[int | None]:
    """The status that each was told."""
    calls = [
        lambda client=client, task=task, body=body: client.send(task, body)
        for client, task, body in zip(clients, tasks, bodies, strict=True)
    ]
    return [one.status_code if one is not None else None for one in at_once(calls)]
