"""What is written down and shown: logs with their fields, numbers for Prometheus, and no secret in any of it."""

from __future__ import annotations

import json
import logging
import secrets
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from promptfed.coordinator.engine.log_lines import JsonFormatter
from promptfed.testing.clients import bearer, drive, secret_of, update_body
from tests.support.coordinators import ForkedCoordinator, InThread
from tests.support.open_phases import completed, enrolled, launched
from tests.support.postgres import PASSWORD
from tests.support.waiting import PATIENCE, wait_for

SITES = ("hospital-a", "hospital-b", "hospital-c")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything that anybody logs, also what a coordinator keeps to itself unless it is asked."""
    caplog.set_level(logging.DEBUG)
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The coordinator's log, as it is written."""
    formatter = JsonFormatter()
    return [json.loads(formatter.format(one)) for one in log.records if one.name.startswith("promptfed")]


def every_kind_of_trouble(coordinator: InThread, federation: str, token: str) -> list[str]:
    """Requests that are refused, with each secret in whatever place it may be put by mistake; the answers."""
    path, right = f"/v1/federations/{federation}", secret_of(SITES[0])
    operator = coordinator.operator["Authorization"].split()[1]
    http, answers = coordinator.http, []
    for secret in (right, token, operator):
        headers = bearer(secret)
        for verb, url, options in (
            ("GET", f"{path}/task?wait=x&token={secret}", {"headers": headers}),
            ("GET", f"{path}/prompts?round={secret}", {"headers": headers}),
            ("POST", f"{path}/clients", {"headers": headers, "json": {"name": 5, "secret": secret}}),
            ("POST", f"{path}/clients", {"headers": headers, "content": b'{"secret": "' + secret.encode()}),
            ("PUT", f"{path}/tasks/none/update", {"headers": headers, "content": secret.encode()}),
            ("POST", "/v1/federations", {"headers": headers, "json": {"name": "x", "method": secret}}),
            ("GET", path, {"headers": bearer(secret[:-1] + "x")}),
            ("GET", path, {"headers": {"Authorization": f"Basic {secret}"}}),
        ):
            response = http.request(verb, url, **options)
            assert response.status_code >= 400, (verb, url)
            answers.append(response.text)
    return answers


@pytest.mark.both_databases
def test_no_secret_is_in_logs_or_metrics(coordinator: InThread, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    federation = coordinator.create(rounds=1)
    token = coordinator.token(federation)
    clients = coordinator.enrol(federation, *SITES[:2])
    coordinator.post(f"{federation}/start")
    drive(clients)
    shown = every_kind_of_trouble(coordinator, federation, token)
    shown += [coordinator.http.get(path).text for path in ("/metrics", "/openapi.json", "/readyz")]
    shown += [json.dumps(coordinator.get(f"{federation}{part}")) for part in ("", "/clients", "/rounds")]
    numbers = coordinator.http.get(f"/v1/federations/{federation}/metrics", headers=coordinator.operator)
    assert numbers.status_code == 200
    shown.append(numbers.text)
    operator = coordinator.operator["Authorization"].split()[1]
    coordinator.stop()
    formatter = JsonFormatter()
    # The tests' own HTTP client logs what it asks for. The access log, off in a coordinator, is on within pytest.
    others = ("httpx", "httpcore", "uvicorn.access")
    shown += [formatter.format(one) for one in log.records if not one.name.startswith(others)]
    for secret in (token, operator, *(secret_of(name) for name in SITES), PASSWORD):
        for place in shown:
            assert secret not in place
    assert stat.S_IMODE((tmp_path / "data" / "operator.token").stat().st_mode) == 0o600


def test_a_line_says_what_it_is_about(coordinator: InThread, log: pytest.LogCaptureFixture) -> None:
    federation, _ = completed(coordinator, *SITES[:2], name="eyes", rounds=1)
    coordinator.until(federation, state="finished")
    coordinator.stop()
    found = lines(log)
    assert {"at", "level", "logger", "message"} <= set.intersection(*(set(line) for line in found))
    told = [line for line in found if line.get("federation") == "eyes"]
    [committed] = [line for line in told if line["message"] == "state-committed" and line.get("round") == 1]
    assert committed["data"]["state_hash"].startswith("sha256:")
    settled = [line for line in told if line["message"] == "task-settled" and line["phase"] == "train"]
    answered = {(1, name, "answered") for name in SITES[:2]}
    assert {(line["round"], line["client"], line["data"]["status"]) for line in settled} == answered
    [closed] = [line for line in told if line["message"] == "phase-closed" and line["phase"] == "train"]
    assert closed["data"]["counted"] == list(SITES[:2])


def test_a_method_that_breaks_is_logged_where_it_broke(
    coordinator: InThread, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, clients = launched(coordinator, *SITES[:2], name="eyes", rounds=1)
    method = type(coordinator.registry.get(federation).method)
    monkeypatch.setattr(method, "aggregate", lambda *_: 1 / 0)
    drive(clients)
    coordinator.until(federation, state="failed")
    [line] = [line for line in lines(log) if line["message"] == "the method failed"]
    about = {"level": "error", "federation": "eyes", "round": 1, "phase": "train"}
    assert {key: line[key] for key in about} == about
    assert "ZeroDivisionError" in line["exception"]


def test_a_line_does_not_grow_with_the_number_of_clients(coordinator: InThread, log: pytest.LogCaptureFixture) -> None:
    federation = coordinator.create(participation={"min_clients": 25})
    coordinator.enrol(federation, *(f"site-{number:03}" for number in range(25)))
    coordinator.post(f"{federation}/start")
    coordinator.until(federation, state="running")
    [opened] = [line for line in lines(log) if line["message"] == "phase-opened"]
    assert len(opened["data"]["asked"]) == 21
    assert opened["data"]["asked"][-1] == "... and 5 more"


def test_a_process_writes_nothing_but_json_lines(tmp_path: Path) -> None:
    process = ForkedCoordinator(tmp_path / "data", "--log-level", "debug")
    secret = secrets.token_hex(32)
    assert process.http.get(f"/v1/federations?token={secret}", headers=bearer(secret)).status_code == 401
    process.create()
    process.signal(15)
    assert process.wait() == 0
    assert [json.loads(line)["level"] for line in process.log().splitlines()]
    assert secret not in process.log()


def numbers(coordinator: InThread) -> dict[str, float]:
    """What /metrics tells, by name and labels."""
    text = coordinator.http.get("/metrics").text
    assert not any(name in text for name in SITES)
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_prometheus_tells_of_rounds_updates_bytes_durations_and_who_waits(coordinator: InThread) -> None:
    asked = {"participation": {"min_clients": 3}, "aggregation": {"clip_norm": 1e-3}}
    federation, clients = launched(coordinator, *SITES, rounds=2, **asked)
    tasks = coordinator.training(clients)
    start = clients[0].payload(tasks[0])
    assert clients[0].send(tasks[0], update_body({"nothing": start["context"]}, tasks[0])).status_code == 422
    drive(clients)
    coordinator.until(federation, state="finished")
    assert clients[0].send(tasks[0], update_body(start, tasks[0])).status_code == 409
    found = numbers(coordinator)
    assert found["promptfed_rounds_completed_total"] == 2
    assert found["promptfed_phases_completed_total"] == 5
    assert found['promptfed_tasks_settled_total{status="answered"}'] == 15
    assert found['promptfed_refusals_total{kind="unknown-tensor"}'] == 1
    assert found['promptfed_federation_moves_total{state="finished"}'] == 1
    assert found['promptfed_updates_total{verdict="clipped"}'] == 6
    assert found['promptfed_updates_total{verdict="refused"}'] == 2, "one with another tensor, one after another"
    assert found["promptfed_update_bytes_total"] > 6 * 4 * 8 * 4
    assert found["promptfed_payload_bytes_total"] > found["promptfed_update_bytes_total"]
    assert found['promptfed_phase_seconds_count{kind="train"}'] == 2
    assert found['promptfed_phase_seconds_count{kind="evaluate"}'] == 3
    assert found['promptfed_work_seconds_count{kind="aggregate"}'] == 2
    assert found['promptfed_work_seconds_count{kind="payloads"}'] == 5
    assert found["promptfed_update_seconds_count"] == 8
    assert found["promptfed_waiting_clients"] == 0


def test_a_round_that_was_given_up_is_not_counted_as_over(coordinator: InThread) -> None:
    federation, clients = launched(coordinator, *SITES[:2], rounds=2, participation={"min_clients": 2})
    coordinator.training(clients)
    coordinator.post(f"{federation}/cancel")
    assert numbers(coordinator)["promptfed_rounds_completed_total"] == 0


def test_a_waiting_client_is_counted_while_it_waits(coordinator: InThread) -> None:
    federation, [client] = enrolled(coordinator, SITES[0])
    poll = threading.Thread(target=client.task, args=(60,))
    poll.start()
    wait_for("the poll", lambda: numbers(coordinator)["promptfed_waiting_clients"] == 1)
    coordinator.delete(f"{federation}/clients/{SITES[0]}")
    poll.join(PATIENCE)
    assert numbers(coordinator)["promptfed_waiting_clients"] == 0


def test_a_password_is_no_secret(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation)
    for poor in ("", "short", "secret", "a" * 63, secrets.token_hex(16)):
        answer = coordinator.client(federation, "a").enrol(token, secret=poor)
        assert answer.status_code == 422, poor
        assert answer.json()["type"].endswith("/invalid-request"), poor
        assert len(poor) < 10 or poor not in answer.text
