"""A federation's deletion: some rows at a time, whoever else calls meanwhile, and to the end whatever comes between."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from promptfed.coordinator.engine import retention
from promptfed.coordinator.store.tables import TaskRow, UpdateRow
from promptfed.testing.clients import drive
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import ForkedCoordinator, InThread, in_thread
from tests.support.fault_points import DELETION_POINTS
from tests.support.open_phases import enrolled
from tests.support.stored import rows, wait_until_empty
from tests.support.waiting import PATIENCE


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def finished(coordinator: OperatorCalls, name: str, rounds: int = 1) -> str:
    id, clients = enrolled(coordinator, "a", "b", name=name, rounds=rounds)
    coordinator.post(f"{id}/start")
    drive(clients)
    coordinator.until(id, state="finished")
    return id


@pytest.mark.both_databases
def test_its_rows_and_blobs_are_gone_and_no_other(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 3)
    kept = finished(coordinator, "kept")
    before, blobs = rows(coordinator), sorted(coordinator.registry.blobs.all())
    page = coordinator.get(f"{kept}/rounds")
    gone = finished(coordinator, "gone")
    coordinator.delete(gone)
    coordinator.get(gone, status=404)
    assert (rows(coordinator), sorted(coordinator.registry.blobs.all())) == (before, blobs)
    assert coordinator.get(f"{kept}/rounds") == page
    coordinator.delete(kept)
    assert coordinator.client(kept, "a").task().status_code == 401
    assert (rows(coordinator), coordinator.registry.blobs.all()) == ({}, [])


@pytest.mark.parametrize("path", ["", "/clients/a/updates"])
def test_no_file_keeps_the_bytes_of_what_was_deleted(coordinator: InThread, tmp_path: Path, path: str) -> None:
    federation = finished(coordinator, "gone")
    with coordinator.registry.database.read() as session:
        mine = select(UpdateRow.sha256).join(TaskRow, TaskRow.id == UpdateRow.task_id).where(TaskRow.client == "a")
        updates = [coordinator.registry.blobs.read(digest) for digest in session.scalars(mine)]
    assert updates

    def kept() -> int:
        files = [one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()]
        return sum(any(update[-256:] in file for file in files) for update in updates)

    assert kept() == len(updates), "small updates lie in the database as they came"
    coordinator.delete(f"{federation}{path}")
    assert kept() == 0


def test_a_log_that_is_not_emptied_undoes_no_deletion(coordinator: InThread, caplog: pytest.LogCaptureFixture) -> None:
    federation = finished(coordinator, "gone")
    connection = coordinator.registry.database.backend.writer.raw_connection()  # the only one that writes

    def refused(action: int, name: str | None, *_: object) -> int:
        checkpoint = action == sqlite3.SQLITE_PRAGMA and name == "wal_checkpoint"
        return sqlite3.SQLITE_DENY if checkpoint else sqlite3.SQLITE_OK

    connection.driver_connection.set_authorizer(refused)
    connection.close()
    coordinator.delete(federation)
    assert rows(coordinator) == {}
    assert "was not emptied behind a deletion: not authorized" in caplog.text
    finished(coordinator, "next")


def test_others_go_on_meanwhile_and_its_name_is_free(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 3)
    gone = finished(coordinator, "eyes")
    between, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        between.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(retention, "_let_others_in", pause)
    headers = coordinator.operator
    url = f"{coordinator.url}/v1/federations/{gone}"

    def delete() -> None:
        answers.append(httpx.delete(url, headers=headers, timeout=PATIENCE))

    deleting = threading.Thread(target=delete)
    answers: list[httpx.Response] = []
    deleting.start()
    assert between.wait(PATIENCE)
    try:
        for path in ("", "/rounds", "/metrics"):
            assert coordinator.http.get(f"/v1/federations/{gone}{path}", headers=headers).status_code == 404
        assert coordinator.http.delete(f"/v1/federations/{gone}", headers=headers).status_code == 404
        monkeypatch.undo()
        finished(coordinator, "eyes")
        assert answers == [], "who asked is answered when all is gone"
    finally:
        go_on.set()
        deleting.join(PATIENCE)
    assert [answer.status_code for answer in answers] == [204]
    assert [one["name"] for one in coordinator.get("/v1/federations")["federations"]] == ["eyes"]


@pytest.mark.extended
@pytest.mark.parametrize("fault", [f"{DELETION_POINTS[0]}:1", *(f"{DELETION_POINTS[1]}:{n}" for n in (1, 3, 6))])
def test_a_killed_deletion_is_taken_up_again(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "data"
    process = ForkedCoordinator(folder, fault=fault)
    try:
        id = finished(process, "gone", rounds=2)
        with pytest.raises(httpx.HTTPError):
            process.delete(id)
        assert process.wait() == -9
    finally:
        process.kill()
    with in_thread(folder) as coordinator:
        assert coordinator.get("/v1/federations")["federations"] == []
        wait_until_empty(coordinator)
        [entry] = [one for one in coordinator.get("/v1/audit-log")["entries"] if one["act"] == "federation-deleted"]
        assert entry["federation"] == id


def test_a_deletion_that_failed_is_finished_by_itself(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    id, some, failed = finished(coordinator, "gone"), retention._delete_some, []

    def fails_once(session: Session, id: str) -> tuple[bool, set[str]]:
        if not failed:
            failed.append(id)
            raise OperationalError("DELETE", {}, Exception("disk I/O error"))
        return some(session, id)

    monkeypatch.setattr(retention, "_delete_some", fails_once)
    assert coordinator.http.delete(f"/v1/federations/{id}", headers=coordinator.operator).status_code >= 500
    assert coordinator.http.get(f"/v1/federations/{id}", headers=coordinator.operator).status_code == 404
    wait_until_empty(coordinator)
