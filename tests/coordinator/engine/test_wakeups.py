"""What waits: long polls and event streams are woken by what they wait for, and by the end of the process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from promptfed.coordinator.engine.registry import EVENTS
from promptfed.testing.clients import bearer, drive
from tests.support.coordinators import CoordinatorProcess, ForkedCoordinator, InThread
from tests.support.open_phases import enrolled
from tests.support.waiting import PATIENCE, wait_for


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def until_waiting(api: Any, what: str, count: int) -> None:
    wait_for(what, lambda: f"promptfed_{what} {count}.0" in api.http.get("/metrics").text)


def test_a_long_poll_is_woken_by_its_task(coordinator: InThread) -> None:
    federation, (a, b) = enrolled(coordinator, "a", "b")
    thread, found = in_background(lambda: a.task(wait=60))
    until_waiting(coordinator, "waiting_clients", 1)
    started = time.monotonic()
    coordinator.post(f"{federation}/start")
    thread.join()
    assert found[0].status_code == 200
    assert time.monotonic() - started < 50, "long before the poll's own end"
    assert b.task(wait=60).json()["kind"] == "evaluate"


def test_a_long_poll_ends_after_its_time(coordinator: InThread) -> None:
    _, [a] = enrolled(coordinator, "a")
    started = time.monotonic()
    assert a.task(wait=0.3).status_code == 204
    assert time.monotonic() - started >= 0.3
    assert a.task(wait=61).status_code == 422


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [("POST", "/cancel", 410), ("DELETE", "/clients/a", 403), ("POST", "/clients/a/reset", 401), ("DELETE", "", 404)],
)
def test_a_long_poll_is_woken_by_what_ends_it(coordinator: InThread, verb: str, path: str, status: int) -> None:
    federation, (a, _) = enrolled(coordinator, "a", "b")
    thread, found = in_background(lambda: a.task(wait=60))
    until_waiting(coordinator, "waiting_clients", 1)
    coordinator.http.request(verb, f"/v1/federations/{federation}{path}", headers=coordinator.operator)
    thread.join(50)  # the poll's own end comes later
    assert found[0].status_code == status


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events of a stream of lines."""
    event: dict[str, Any] = {}
    for line in lines:
        if line == "" and event:
            yield event
            event = {}
        elif line and not line.startswith(":"):
            key, _, value = line.partition(": ")
            event[key] = json.loads(value) if key == "data" else value


def test_events_tell_the_whole_story_and_go_on_where_one_left_off(coordinator: InThread) -> None:
    federation, clients = enrolled(coordinator, "a", "b", rounds=1)
    path = f"/v1/federations/{federation}/events"
    story: list[dict[str, Any]] = []

    def listen() -> None:
        with coordinator.http.stream("GET", path, headers=coordinator.operator) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            story.extend(events(response.iter_lines()))

    thread, _ = in_background(listen)
    until_waiting(coordinator, "event_streams", 1)
    coordinator.post(f"{federation}/start")
    drive(clients)
    thread.join(PATIENCE)
    kinds = [one["event"] for one in story]
    assert kinds[0] == "federation-created"
    assert kinds.count("client-enrolled") == 2
    assert kinds.count("phase-opened") == kinds.count("phase-closed") == kinds.count("phase-completed") == 3
    assert kinds.count("state-committed") == 2
    assert story[-1]["data"]["state"] == "finished"
    ids = [int(one["id"]) for one in story]
    assert ids == sorted(set(ids))
    half = story[len(story) // 2]["id"]
    response = coordinator.http.get(path, headers=coordinator.operator | {"Last-Event-ID": half})
    assert list(events(iter(response.text.splitlines()))) == story[len(story) // 2 + 1 :]
    assert coordinator.http.get(path).status_code == 401
    assert coordinator.http.get(path, headers=coordinator.operator | {"Last-Event-ID": "x"}).status_code == 422


@pytest.mark.parametrize("how", ["taken back", "ends"])
def test_a_stream_ends_with_the_token_that_it_was_asked_for_with(coordinator: InThread, how: str) -> None:
    federation = coordinator.create()
    path = f"/v1/federations/{federation}/events"
    asked = {"name": "anna", "role": "viewer", "hours": 24.0}
    minted = coordinator.post("/v1/operators", asked, status=201)
    other = coordinator.post("/v1/operators", {**asked, "name": "ben"}, status=201)
    streams = []
    for token in (minted["token"], other["token"]):

        def listen(token: str = token) -> int:
            with coordinator.http.stream("GET", path, headers=bearer(token)) as response:
                return len(list(events(response.iter_lines())))

        streams.append(in_background(listen))
    until_waiting(coordinator, "event_streams", 2)
    if how == "taken back":
        coordinator.delete(f"/v1/operators/{minted['id']}")
    else:
        registry, soon = coordinator.registry, datetime.now(UTC) + timedelta(seconds=0.3)
        known = registry.operators.items()
        registry.operators = {k: replace(one, expires=soon) if one.name == "anna" else one for k, one in known}
        registry.wake([(federation, EVENTS)])  # from here on nothing wakes it but that end
    streams[0][0].join(PATIENCE)
    assert streams[0][1] == [1], "it has ended in order, with what had happened"
    coordinator.enrol(federation, "a")
    assert streams[1][0].is_alive(), "another's goes on"
    coordinator.post(f"{federation}/cancel")
    streams[1][0].join(PATIENCE)
    assert streams[1][1][0] > 1


@pytest.fixture
def process(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    server = CoordinatorProcess(tmp_path / "data")
    yield server
    if not server.dead:
        server.kill()


@pytest.mark.extended
def test_a_second_coordinator_on_the_same_folder_is_refused(process: CoordinatorProcess, tmp_path: Path) -> None:
    second = ForkedCoordinator(process.folder, files=tmp_path / "second")
    assert second.wait() == 2
    assert "another coordinator works on" in second.log()
    assert "Traceback" not in second.log()
    assert process.get("/v1/federations") == {"federations": [], "next": None}


@pytest.mark.extended
def test_bootstrap_creates_once_and_writes_a_token(tmp_path: Path) -> None:
    spec_file, token_file = tmp_path / "spec.yaml", tmp_path / "token"
    spec_file.write_text("name: boot\nmethod: {name: promptfl, m: 4}\nparticipation: {min_clients: 2}\n")
    options = ("--bootstrap", str(spec_file), "--enrolment-token-file", str(token_file))
    server = ForkedCoordinator(tmp_path / "data", *options)
    assert token_file.stat().st_mode & 0o777 == 0o600
    token = token_file.read_text().strip()
    assert server.client("boot", "a").enrol(token).status_code == 201
    server.kill()
    server.start()
    assert token_file.read_text().strip() == token, "a good token is kept"
    assert [one["name"] for one in server.get("/v1/federations")["federations"]] == ["boot"]
    assert server.client("boot", "b").enrol(token).status_code == 201
    assert server.client("boot", "c").enrol(token).status_code == 409, "it is for min_clients"
    server.kill()
    token_file.unlink()
    server._options = (*options, "--enrolment-token-uses", "3")
    server.start()
    token = token_file.read_text().strip()
    answers = [server.client("boot", name).enrol(token).status_code for name in "cd"]
    assert answers == [201, 409], "two of three had enrolled"
    server.kill()

    spec_file.write_text("name: boot\nmethod: {name: nonsense}\n")
    server.start()
    assert server.wait() == 2
    assert "method.name" in server.log().splitlines()[-1]
