"""What is kept is given up again on demand, and what was backed up goes on."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from promptfed.coordinator.engine import retention
from promptfed.testing.clients import ScriptedClient, drive
from promptfed.testing.coordinator import OperatorCalls
from tests import ROOT
from tests.support.coordinators import InThread, in_thread
from tests.support.postgres import PostgresServer
from tests.support.waiting import PATIENCE
from tests.support.whole_federation import outcome

BACKUP = ROOT / "docs" / "guides" / "backup.md"
BACK_UP, RESTORE, BACK_UP_DATABASE, RESTORE_DATABASE = range(4)


def stored(coordinator: InThread, federation: str, client: str) -> set[str]:
    """Digests of a client's updates whose bytes are still there."""
    rounds = coordinator.get(f"{federation}/rounds")["rounds"]
    sent = {
        one["sha256"].removeprefix("sha256:") for report in rounds for phase in report["phases"]
        for one in phase["updates"] if one["client"] == client
    }  # fmt: skip
    assert sent, "the reports keep the digests"
    return sent & {digest.removeprefix("sha256:") for digest in coordinator.registry.blobs.all()}


def replay(coordinator: InThread, federation: str) -> httpx.Response:
    return coordinator.http.post(f"/v1/federations/{federation}/rounds/1/replay", headers=coordinator.operator)


def one_round_over(coordinator: InThread, federation: str, clients: list[ScriptedClient]) -> list[dict[str, Any]]:
    """The training tasks of round 2."""
    tasks = coordinator.training(clients)
    for client, task in zip(clients, tasks, strict=True):
        assert client.answer(task).status_code == 201
    return coordinator.training(clients)


def test_a_withdrawn_client_s_updates_are_deleted_and_nobody_else_s(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=3, evaluation={"every": 3})
    a, b, c = clients = coordinator.enrol(federation, "a", "b", "c")
    coordinator.post(f"{federation}/start")
    tasks = dict(zip(("a", "b", "c"), one_round_over(coordinator, federation, clients), strict=True))
    problem = coordinator.delete(f"{federation}/clients/a/updates", status=409)
    assert "withdraw it first" in problem["detail"]
    assert a.answer(tasks["a"]).status_code == 201
    coordinator.delete(f"{federation}/clients/a")
    problem = coordinator.delete(f"{federation}/clients/a/updates", status=409)
    assert "yet to be counted" in problem["detail"], "its accepted update of the open phase counts"
    assert len(stored(coordinator, federation, "a")) == 2
    for client in (b, c):
        assert client.answer(tasks[client.name]).status_code == 201
    coordinator.until(federation, round=3)
    before = coordinator.get(f"{federation}/rounds")["rounds"]
    coordinator.delete(f"{federation}/clients/a/updates")
    coordinator.delete(f"{federation}/clients/a/updates")
    assert stored(coordinator, federation, "a") == set()
    assert len(stored(coordinator, federation, "b")) == 2
    assert coordinator.get(f"{federation}/rounds")["rounds"][:2] == before[:2], "reports stay as they were"
    gone = replay(coordinator, federation)
    assert (gone.status_code, gone.json()["type"].rsplit("/")[-1]) == (410, "updates-gone")
    drive([b, c])
    assert coordinator.get(federation)["state"] == "finished"
    coordinator.delete(f"{federation}/clients/b/updates")
    assert stored(coordinator, federation, "b") == set(), "once all is over, anybody's"
    coordinator.delete(f"{federation}/clients/nobody/updates", status=404)


def test_a_discarded_update_can_be_deleted_at_once(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=1)
    a, *others = coordinator.enrol(federation, "a", "b", "c")
    coordinator.post(f"{federation}/start")
    task, *_ = coordinator.training([a, *others])
    assert a.answer(task).status_code == 201
    coordinator.delete(f"{federation}/clients/a?discard=true")
    coordinator.delete(f"{federation}/clients/a/updates")
    assert stored(coordinator, federation, "a") == set()


def blocks() -> list[str]:
    """The recipe's commands, as the documentation has them."""
    marked = r"test_life_cycle.py runs this block -->\n```bash\n(.*?)```"
    return re.findall(marked, BACKUP.read_text(), re.DOTALL)


def shell(commands: str, **variables: str) -> None:
    """Run commands of the documentation."""
    done = subprocess.run(
        ["bash", "-euc", commands], env=os.environ | variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def rejoined(coordinator: OperatorCalls, federation: str, names: tuple[str, ...]) -> list[ScriptedClient]:
    """The clients of before, with their secrets."""
    return [coordinator.client(federation, name) for name in names]


@pytest.mark.both_databases
def test_a_restored_backup_goes_on_to_the_same_end(
    tmp_path: Path, database: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres") if database else None
    places = {"DATA": str(tmp_path / "data"), "BACKUP": str(tmp_path)}
    at_first = {"database_url": server.database()} if server else {}
    names = ("a", "b")
    with in_thread(tmp_path / "data", **at_first) as coordinator:
        federation = coordinator.create(rounds=3)
        clients = coordinator.enrol(federation, *names)
        coordinator.post(f"{federation}/start")
        tasks = one_round_over(coordinator, federation, clients)
        assert clients[0].answer(tasks[0]).status_code == 201, "the backup finds round 2 half answered"
    shell(blocks()[BACK_UP], **places)
    if server:
        shell(blocks()[BACK_UP_DATABASE], **places, **tools(server, at_first["database_url"]))
    expected = finish(tmp_path / "data", at_first, federation, names)
    (tmp_path / "data").rename(tmp_path / "lost")
    shell(blocks()[RESTORE], **places)
    anew = {"database_url": server.database()} if server else {}
    if server:
        shell(blocks()[RESTORE_DATABASE], **places, **tools(server, anew["database_url"]))
    assert finish(tmp_path / "data", anew, federation, names) == expected
    assert expected["state"] == "finished"
    assert [len(one[0]) for one in expected["counted"][1:]] == [2, 2, 2]


def tools(server: PostgresServer, url: str) -> dict[str, str]:
    """The server's own pg_dump and pg_restore first on the path, and the URL as they read it."""
    return {"URL": url.replace("+psycopg", ""), "PATH": f"{server._bin}{os.pathsep}{os.environ['PATH']}"}


def finish(folder: Path, options: dict[str, Any], federation: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What comes of the federation once its clients have gone on."""
    with in_thread(folder, **options) as coordinator:
        drive(rejoined(coordinator, federation, names))
        coordinator.until(federation, state="finished")
        return outcome(coordinator, federation)


def test_a_deletion_lets_others_in_between(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = coordinator.create(rounds=3)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    drive(clients)
    coordinator.until(federation, state="finished")
    files, begun, created = coordinator.registry.blobs.all(), threading.Event(), threading.Event()

    def turn(seconds: float) -> None:
        begun.set()
        assert created.wait(PATIENCE)

    monkeypatch.setattr(retention, "AT_ONCE", 1)
    monkeypatch.setattr(retention, "time", SimpleNamespace(sleep=turn))
    deletion = threading.Thread(target=coordinator.delete, args=(federation,))
    deletion.start()
    assert begun.wait(PATIENCE)
    coordinator.create(name="other")
    assert len(coordinator.registry.blobs.all()) > len(files) // 3, "it had to wait for the whole deletion"
    created.set()
    deletion.join()
    assert coordinator.registry.blobs.all() == []
