"""A run computed again from its kept updates, to the same hashes."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import text

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.resources.results import verification
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.folder import SQLITE_FILE
from promptfed.coordinator.store.opening import Store, open_store
from promptfed.coordinator.store.tables import StateRow, TaskRow
from promptfed.shared.methods import METHODS
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import ScriptedClient, drive, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import enrolled, supply
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.fixture(autouse=True)
def two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def again(coordinator: InThread, federation: str, round: int, status: int = 200) -> Any:
    return coordinator.post(f"{federation}/rounds/{round}/replay", {}, status=status)


def finished(coordinator: InThread, method: str, **changes: Any) -> str:
    """A federation of three rounds with a newcomer for the third, from which another client is withdrawn."""
    federation = coordinator.create(method={"name": method}, rounds=3, participation={"quorum": 0.5}, **changes)
    clients = [coordinator.enrol(federation, name, num_samples=n)[0] for name, n in (("b", 10), ("d", 30), ("a", 20))]
    coordinator.post(f"{federation}/start")
    play(coordinator, federation, clients, until=1)
    clients += coordinator.enrol(federation, "c", num_samples=40)
    play(coordinator, federation, clients, until=2)
    coordinator.delete(f"{federation}/clients/b")
    drive([client for client in clients if client.name != "b"])
    assert coordinator.get(federation)["state"] == "finished"
    return federation


def play(coordinator: InThread, federation: str, clients: list[ScriptedClient], until: int) -> None:
    while coordinator.get(federation)["round"] <= until:
        for client in clients:
            client.work()
        time.sleep(0.005)


def test_a_whole_run_comes_to_the_same_hashes(coordinator: InThread) -> None:
    federation = finished(coordinator, "two_phase")
    reports = {one["round"]: one for one in coordinator.get(f"{federation}/rounds")["rounds"]}
    origins, once = [], ["prompts", "aggregators"]
    for round in range(4):
        found = again(coordinator, federation, round)
        for state in found["states"]:
            assert (state["same"], state["replayed_hash"]) == (True, state["state_hash"])
            origins.append(state["origin"])
        phases = [one for one in found["states"] if one["origin"] in once]
        assert [one["state_hash"] for one in phases] == [one["state_hash"] for one in reports[round]["phases"]]
        if found["states"]:
            assert found["states"][-1]["state_hash"] == reports[round]["state_hash"]
    assert origins == ["initial", *once, *once, "join", *once]


def test_a_supplied_state_and_robust_rules_are_computed_again_too(coordinator: InThread) -> None:
    krum = {"rule": "multi_krum", "clip_norm": "median"}
    federation = coordinator.create(rounds=1, participation={"min_clients": 5}, aggregation=krum)
    body = encode({"context": torch.full((4, 8), 0.25)})
    assert supply(coordinator, federation, body).status_code == 200
    clients = coordinator.enrol(federation, *"abcde")
    coordinator.post(f"{federation}/start")
    drive(clients)
    for round in range(2):
        found = again(coordinator, federation, round)
        assert [one["same"] for one in found["states"]] == [True]


def one_round(
    coordinator: InThread, method: str = "promptfl", names: str = "abcde", **changes: Any
) -> tuple[str, Tensors]:
    """A finished federation of one round; what each client has sent."""
    changes = {"participation": {"min_clients": 2}, "admission": {"max_update_norm": 1e6}} | changes  # b's is long
    federation = coordinator.create(rounds=1, method={"name": method}, **changes)
    clients = [coordinator.enrol(federation, name, num_samples=10 * (i + 1))[0] for i, name in enumerate(names)]
    coordinator.post(f"{federation}/start")
    sent = {}
    tasks = coordinator.training(clients)
    if method == "promptfl":
        for number, (client, task) in enumerate(zip(clients, tasks, strict=True)):
            draws = torch.Generator().manual_seed(number)
            sent[client.name] = torch.randn(4, 8, generator=draws) * (100 if client.name == "b" else 1)
            assert client.send(task, update_body({"context": sent[client.name]}, task)).status_code == 201
    drive(clients)
    return federation, sent


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InThread, str, Tensors]]:
    """A coordinator with two federations that are over: of five, with what they have sent, and of two (``pair``)."""
    with in_thread(tmp_path_factory.mktemp("replay") / "data") as coordinator:
        five, sent = one_round(coordinator, aggregation={"max_weight_share": 0.4})
        one_round(coordinator, name="pair", names="ab")
        yield coordinator, five, sent


def test_rounds_under_way_and_rounds_not_kept_are_refused(coordinator: InThread) -> None:
    federation, clients = enrolled(coordinator, "a", "b", rounds=2, retention="last_round")
    assert again(coordinator, federation, 0, status=404)["type"].endswith("/no-state")
    coordinator.post(f"{federation}/start")
    coordinator.training(clients)
    assert again(coordinator, federation, 1, status=404)["type"].endswith("/no-state")
    drive(clients)
    coordinator.until(federation, state="finished")

    def refused() -> httpx.Response:
        address = f"/v1/federations/{federation}/rounds/1/replay"
        return coordinator.http.post(address, json={}, headers=coordinator.operator)

    gone = eventually(refused, 410)
    assert gone.json()["type"].endswith("/updates-gone")
    assert "retention: last_round" in gone.json()["detail"]


def eventually(ask: Callable[[], httpx.Response], status: int) -> httpx.Response:
    end = time.monotonic() + PATIENCE
    while (answer := ask()).status_code != status:
        assert time.monotonic() < end, f"{status} does not come; it is {answer.status_code}: {answer.text}"
        time.sleep(0.05)
    return answer


def test_what_was_changed_afterwards_shows(over: tuple[InThread, str, Tensors]) -> None:
    coordinator, federation, _ = over
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [True]
    weights: list[float] = []

    def change(weight: float) -> None:
        mine = (TaskRow.federation_id == federation, TaskRow.client == "d", TaskRow.weight.is_not(None))
        with coordinator.registry.database.write() as session:
            row = session.query(TaskRow).where(*mine).one()
            weights.append(row.weight or 0)
            row.weight = weight

    change(0.9)
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [False]
    change(weights[0])


@pytest.mark.extended
def test_a_long_replay_holds_up_nobody(over: tuple[InThread, str, Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, federation, _ = over
    after_phase = global_state.after_phase
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Tensors:
        begun.set()
        assert go_on.wait(PATIENCE)
        return after_phase(*arguments)

    monkeypatch.setattr(global_state, "after_phase", slow)
    with asking(coordinator, f"{federation}/rounds/1/replay") as answers:
        assert begun.wait(PATIENCE)
        assert coordinator.http.get("/readyz").status_code == 200
        assert coordinator.get(federation)["state"] == "finished"
        assert answers == []
        go_on.set()
    assert [one["states"][0]["same"] for one in answers] == [True]


@pytest.mark.extended
def test_a_stop_does_not_wait_for_a_long_replay(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = one_round(coordinator)
    begun, go_on = threading.Event(), threading.Event()

    def endless(*_: Any) -> Tensors:
        begun.set()
        go_on.wait(2 * PATIENCE)  # longer than a stop may take here
        raise AssertionError("nobody wants this any more")

    monkeypatch.setattr(global_state, "after_phase", endless)
    url = f"{coordinator.url}/v1/federations/{federation}/rounds/1/replay"
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(httpx.post(url, json={}, headers=coordinator.operator, timeout=PATIENCE).status_code)
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(PATIENCE)
    coordinator.stop()
    assert coordinator.registry.computing, "a process ends without waiting for it"
    go_on.set()
    thread.join(PATIENCE)
    assert len(answers) == 1
    assert answers != [200]


@contextmanager
def asking(coordinator: InThread, path: str) -> Iterator[list[Any]]:
    """A POST that is under way during the block."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(coordinator.post(path, {})))
    thread.start()
    yield answers
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_state_that_is_not_what_was_recorded_shows_although_what_follows_from_it_is(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=2)
    drive(started(coordinator, federation, "a", "b"))
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [True]
    with coordinator.registry.database.write() as session:
        [first] = session.query(StateRow).where(StateRow.federation_id == federation, StateRow.round == 0)
        first.state_hash = "sha256:" + "0" * 64
    [found] = again(coordinator, federation, 1)["states"]
    assert found["replayed_hash"] == found["state_hash"]
    assert found["same"] is False, "it was computed from another state than the one that is recorded"


def started(coordinator: InThread, federation: str, *names: str) -> list[ScriptedClient]:
    clients = coordinator.enrol(federation, *names)
    coordinator.post(f"{federation}/start")
    return clients


# ``--verify``: whatever is damaged is named, and the exit code says that there is something.


def played(folder: Path, **options: Any) -> None:
    with in_thread(folder, **options) as coordinator:
        federation = coordinator.create(rounds=1)
        assert supply(coordinator, federation, encode({"context": torch.full((4, 8), 0.25)})).status_code == 200
        drive(started(coordinator, federation, "a", "b"))


@pytest.fixture(scope="module")
def once_played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified") / "data"
    played(folder)
    return folder


@pytest.fixture
def folder(once_played: Path, tmp_path: Path) -> Path:
    """A data folder with a federation that is over."""
    return shutil.copytree(once_played, tmp_path / "data")


def looked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["--verify", "--data-dir", str(folder), *options])
    return code, capsys.readouterr().out.splitlines()


def changed(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / SQLITE_FILE)) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0


UPDATE, STATE, PAYLOAD, SUPPLIED = (
    f"(SELECT {of} LIMIT 1)"
    for of in (
        "sha256 FROM updates ORDER BY sha256",
        "sha256 FROM states ORDER BY id DESC",
        "payload_sha256 FROM tasks ORDER BY payload_sha256 = (SELECT sha256 FROM states ORDER BY id DESC LIMIT 1)",
        "supplied_state FROM federations",
    )
)
DAMAGES: list[tuple[str, list[str]]] = [
    (f"UPDATE blobs SET content = zeroblob(9) WHERE digest = {UPDATE}", ["the update of ", "has changed"]),
    (f"DELETE FROM blobs WHERE digest = {UPDATE}", ["in round 1 (train) of eyes", "is missing"]),
    (f"UPDATE blobs SET content = zeroblob(length(content)) WHERE digest = {STATE}", ["the state of round 1 of eyes"]),
    (f"UPDATE blobs SET content = zeroblob(9) WHERE digest = {PAYLOAD}", ["the payload of round 1 (train) of eyes"]),
    (f"DELETE FROM blobs WHERE digest = {SUPPLIED}", ["the supplied initial state of eyes"]),
    ("UPDATE states SET state_hash = 'sha256:0' WHERE round = 1", ["is another state than the recorded sha256:0"]),
    ("UPDATE updates SET bytes = bytes + 1", ["instead of the recorded"]),
    ("UPDATE states SET bytes = bytes + 1", ["the state of round 1 of eyes", "instead of the recorded"]),
    ("UPDATE tasks SET payload_bytes = payload_bytes + 1", ["the payload of round ", "instead of the recorded"]),
    (
        "UPDATE evaluations SET body = json_set(body, '$.splits.test.accuracy', 1)",
        ["an evaluation of 'a' in eyes has changed"],
    ),
    ("UPDATE audit_log SET actor = 'somebody' WHERE number = 2", ["the audit log: entry 2 was changed"]),
    ("UPDATE federations SET spec = json_set(spec, '$.rounds', -1)", ["the spec of eyes: rounds: "]),
    ("UPDATE federations SET spec = '{'", ["the spec of eyes: Expecting property name"]),
    (
        f"UPDATE updates SET task_id = 'n' WHERE sha256 = {UPDATE}",
        ["the database itself: a row of updates belongs to none of tasks"],
    ),
]


@pytest.mark.parametrize(("statement", "wanted"), DAMAGES)
def test_damage_is_named(folder: Path, capsys: pytest.CaptureFixture[str], statement: str, wanted: list[str]) -> None:
    changed(folder, statement)
    code, lines = looked(folder, capsys)
    assert code == 1
    for part in wanted:
        assert any(line.startswith("damaged: ") and part in line for line in lines), lines
    assert lines[-1] == f"{len(lines) - 1} damaged in {folder / SQLITE_FILE}"


def test_what_is_not_kept_is_not_looked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert looked(folder, capsys) == (0, [f"all of {folder / SQLITE_FILE} and its blobs is what was stored"])
    kept = ("UPDATE states SET stored = 0", "UPDATE updates SET stored = 0", "UPDATE tasks SET payload_stored = 0")
    changed(folder, *kept, "UPDATE federations SET supplied_state = NULL", "DELETE FROM blobs")
    assert looked(folder, capsys)[0] == 0
    changed(folder, "UPDATE federations SET spec = '{', state = 'deleting'")
    assert looked(folder, capsys)[0] == 0


def test_files_are_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "SMALL_BYTES", -1)
    played(tmp_path / "data")
    code, lines = looked(tmp_path / "data", capsys)
    assert (code, len(lines)) == (0, 1)
    files = list((tmp_path / "data" / "blobs").glob("*/*"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    code, lines = looked(tmp_path / "data", capsys)
    assert code == 1
    for path in files:
        assert any(f"sha256:{path.name}" in line and "has changed" in line for line in lines)


def test_pages_of_garbage_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = folder / SQLITE_FILE
    with closing(sqlite3.connect(database)) as connection:
        [page] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'evaluations'").fetchone()
    content = bytearray(database.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    database.write_bytes(content)
    code, lines = looked(folder, capsys)
    assert code == 1
    assert any(line.startswith("damaged: the database itself") for line in lines)
    assert any(line.startswith("damaged: evaluations cannot be read: ") for line in lines)
    assert lines[-1] == f"{len(lines) - 1} damaged in {database}"


def test_nothing_is_made_or_taken_from_a_coordinator(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> tuple[int, str]:
        code = main(["--verify", "--data-dir", str(folder)])
        return code, capsys.readouterr().err

    assert looked(folder / "nothing", capsys) == (2, [])
    assert not (folder / "nothing").exists()
    with closing(open_store(Settings(data_dir=folder))):
        code, line = said()
        assert (code, "another coordinator works on" in line) == (2, True)

    def away(settings: Settings) -> Store:
        raise DatabaseAway("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(verification, "open_to_look", away)
        assert said() == (3, "coordinator: no answer\n")
    changed(folder, "UPDATE alembic_version SET version_num = '0008'")
    code, line = said()
    assert (code, "have the form 0008 of promptfed before 0.4.0" in line) == (2, True)


@pytest.mark.extended  # on SQLite the damages above are looked at
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_whole_database_is_read(tmp_path: Path, database: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    played(tmp_path / "data", **database)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in database.items()]
    assert looked(tmp_path / "data", capsys, *options)[0] == 0
    with in_thread(tmp_path / "data", **database) as coordinator, coordinator.registry.database.write() as session:
        session.execute(text(f"DELETE FROM blobs WHERE digest = {UPDATE}"))
    code, lines = looked(tmp_path / "data", capsys, *options)
    assert (code, len(lines)) == (1, 2)
    assert "is missing" in lines[0]
