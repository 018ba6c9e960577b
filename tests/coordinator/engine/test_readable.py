"""No report fails because of one row: what a client has sent, or a disk has damaged, is named and left out."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.folder import SQLITE_FILE
from promptfed.coordinator.store.form import expect_this_version
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.shared.privacy.accounting import training_event
from promptfed.testing.clients import ScriptedClient, drive, trained, update_body
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import InProcess, InThread, in_process
from tests.support.open_phases import completed, launched, metrics, open_first_phase
from tests.support.open_phases import told as refused_as

REPORTS = ("", "/rounds", "/rounds/1", "/remarks", "/rounds/1/card", "/metrics", "/privacy", "/clients")
FORGED = {"loss": 0.5, "privacy_epsilon": 1.0, "asked": 7.0, "norm": 1.0, "made_up": 3.0}
HUGE = 10**40


def answers(coordinator: OperatorCalls, federation: str) -> dict[str, httpx.Response]:
    """Every report on the federation; none fails."""
    path = f"/v1/federations/{federation}"
    found = {name: coordinator.http.get(path + name, headers=coordinator.operator) for name in REPORTS}
    assert {name: answer.status_code for name, answer in found.items()} == dict.fromkeys(REPORTS, 200)
    return found


def evaluate(client: ScriptedClient, task: dict[str, Any], **changes: Any) -> httpx.Response:
    body = {"splits": {"test": {"accuracy": 0.5, "num_samples": 20}}} | changes
    return client.http.put(f"{client.path}/tasks/{task['task_id']}/evaluation", json=body, headers=client.headers)


def test_numbers_that_a_method_does_not_declare_are_dropped_and_logged(
    coordinator: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "promptfed.coordinator")
    federation, (a, b) = launched(coordinator, "a", "b", rounds=1)
    for client in (a, b):
        told = {"evaluate_seconds": 0.25, "domain_share:x": 0.5, "privacy_epsilon": 1.0, "\x1b[2J": 1.0, "loss": 1e31}
        assert evaluate(client, coordinator.task(client), metrics=told).status_code == 201
    for client in (a, b):
        task = coordinator.task(client)
        update = update_body(trained(client.payload(task), client.name, task), task, metrics=FORGED)
        assert client.send(task, update).status_code == 201
    lines = [record.getMessage() for record in caplog.records if "numbers of a are dropped" in record.getMessage()]
    assert [line.rpartition(": ")[2] for line in lines] == [
        "\\x1b[2J, domain_share:x, loss, privacy_epsilon",
        "asked, made_up, norm, privacy_epsilon",
    ]
    drive([a, b])
    assert coordinator.get(federation)["state"] == "finished"
    answers(coordinator, federation)
    first, second = coordinator.get(f"{federation}/rounds")["rounds"]
    assert [update["metrics"] for update in second["phases"][0]["updates"]] == [{"loss": 0.5}] * 2
    assert first["evaluation"]["clients"]["a"]["metrics"] == {"evaluate_seconds": 0.25}
    names = {line["name"] for line in metrics(coordinator, federation) if line["phase"] == "train"}
    assert "made_up" not in names
    assert not any("privacy" in name for name in names)


def test_an_evaluation_of_more_images_than_there_are_is_refused(coordinator: InThread) -> None:
    _, (a, _) = launched(coordinator, "a", "b")
    task = coordinator.task(a)
    for count in (0, (1 << 40) + 1, HUGE):
        wrong = {"test": {"accuracy": 0.5, "num_samples": count}}
        for changes in ({"splits": wrong}, {"zero_shot": wrong}):
            assert refused_as(evaluate(a, task, **changes)) == (422, "invalid-request"), count
    most = {"test": {"accuracy": 0.5, "num_samples": 1 << 40}}
    assert evaluate(a, task, splits=most).status_code == 201


OF_A = "task_id IN (SELECT id FROM tasks WHERE client = 'a')"
RESULT = {"accuracy": 0.5, "num_samples": 20}
DAMAGES = {
    "a text for a number": ("updates", "metrics", json.dumps({"loss": "high"}), "metrics.loss"),
    "no mapping": ("updates", "metrics", "[1]", "metrics"),
    "another verdict": ("updates", "judged", json.dumps({"verdict": "eaten"}), "verdict"),
    "a cost without its figures": ("updates", "spent", "{}", "epsilon"),
    "more images than there are": (
        "evaluations", "body",
        json.dumps({"splits": {"test": RESULT | {"num_samples": HUGE}}, "zero_shot": {}, "metrics": {}}),
        "splits.test.num_samples",
    ),
    "an accuracy over 1": (
        "evaluations", "body",
        json.dumps({"splits": {"test": RESULT | {"accuracy": 2}}, "zero_shot": {}, "metrics": {}}),
        "splits.test.accuracy",
    ), "no body": ("evaluations", "body", "[]", "TypeError"),
    "two events": (
        "evaluations", "body",
        json.dumps({"splits": {}, "zero_shot": {}, "metrics": {}, "privacy": {"events": [1, 2]}}), "ValueError",
    ), "no JSON in an update": ("updates", "metrics", "loss: 0.5", "metrics"),
    "no JSON in an evaluation": ("evaluations", "body", "{", "TypeError"),
}  # fmt: skip


@pytest.mark.both_databases
def test_a_damaged_row_is_named_and_all_others_are_told(coordinator: InThread) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=2)
    statement = "UPDATE {0} SET {1} = (SELECT kept.{1} FROM kept_{0} AS kept WHERE kept.task_id = {0}.task_id)"
    with coordinator.registry.database.write() as session:
        for table in ("updates", "evaluations"):
            session.execute(text(f"CREATE TABLE kept_{table} AS SELECT * FROM {table}"))
    for damage in DAMAGES if coordinator.settings.url() is None else ("no body",):  # PostgreSQL stores JSON alone
        table, column, value, why = DAMAGES[damage]
        with coordinator.registry.database.write() as session:
            session.execute(text(f"UPDATE {table} SET {column} = :value WHERE {OF_A}"), {"value": value})
        found = answers(coordinator, federation)
        page = found["/rounds"].json()["rounds"][1:]
        stages = [report["phases"][0] if table == "updates" else report["evaluation"] for report in page]
        what = "update" if table == "updates" else "evaluation"
        for stage in stages:
            [line] = stage["unreadable"]
            assert line.startswith(f"the {what} of a: {why}"), (damage, line)
            left = [one["client"] for one in stage["updates"]] if table == "updates" else list(stage["clients"])
            assert left == ["b"], damage
        assert found["/rounds/1/card"].json()["unreadable"] >= 1, damage
        assert {line["client"] for line in metrics(coordinator, federation)} >= {"b"}
        with coordinator.registry.database.write() as session:
            session.execute(text(statement.format(table, column)))


def test_what_was_measured_of_a_phase_may_be_damaged_too(coordinator: InThread) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=1)
    with coordinator.registry.database.write() as session:
        session.execute(text("UPDATE tasks SET failure = '{}', weight = 0 WHERE client = 'a'"))
        session.execute(text(f"UPDATE updates SET metrics = :value WHERE {OF_A}"), {"value": '{"loss": 9.0}'})
    for stored in ("[]", '{"changes": {"a": "far"}}', "not JSON"):
        with coordinator.registry.database.write() as session:
            session.execute(text("UPDATE phases SET measured = :stored WHERE kind = 'train'"), {"stored": stored})
        phase = answers(coordinator, federation)["/rounds/1"].json()["phases"][0]
        assert [line.partition(":")[0] for line in phase["unreadable"]] == ["what was measured", "the failure of a"]
        assert [update["client"] for update in phase["updates"]] == ["a", "b"]
        assert {one["client"]: one["weight"] for one in phase["counted"]} == {"a": 0.0, "b": 0.5}
        assert phase["metrics"] == phase["updates"][1]["metrics"] != phase["updates"][0]["metrics"]


SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
SPENT = {"events": [training_event(10, 32, 1, 1.0).as_json()], "epsilon": 3.5, "delta": 1e-3, "noise": "secret"}


def as_before(folder: Path, told: dict[str, dict[str, Any]]) -> None:
    """Bring a stopped coordinator's store to the form 0026, with these numbers of each client's updates."""
    connection = sqlite3.connect(folder / SQLITE_FILE)
    connection.execute("ALTER TABLE updates DROP COLUMN spent")
    connection.execute("ALTER TABLE exchanges RENAME COLUMN spent TO metrics")
    connection.execute("UPDATE alembic_version SET version_num = '0026'")
    for client, numbers in told.items():
        mine = "task_id IN (SELECT id FROM tasks WHERE client = ?)"
        connection.execute(f"UPDATE updates SET metrics = ? WHERE {mine}", (json.dumps(numbers), client))
    connection.commit()
    connection.close()


def private(epsilon: float, **more: float) -> dict[str, float]:
    """Numbers of an update as they were stored before costs had a column of their own."""
    own = {"epsilon": epsilon, "delta": 1e-3, "z": 1.0, "seeded": 0.0, "q": 1.0, "count": 1}
    return {"steps": 1.0} | {f"privacy_{name}": value for name, value in (own | more).items()}


def test_a_store_of_before_is_read_with_what_clients_had_made_up(tmp_path: Path) -> None:
    folder = tmp_path / "coordinator"
    with in_process(folder) as coordinator:
        plain, _ = completed(coordinator, "a", "b", rounds=1, name="plain")
        own, (c, d), tasks = open_first_phase(
            coordinator, "c", "d", rounds=2, name="own", privacy=SAMPLE, training={"epochs": 1}
        )
        for client, task in zip((c, d), tasks, strict=True):
            update = update_body(trained(client.payload(task), client.name, task), task, metrics={}, privacy=SPENT)
            sent = client.send(task, update)
            assert sent.status_code == 201, sent.text
        coordinator.until(own, round=1, phase="evaluation")
    as_before(folder, {"a": FORGED, "b": {"loss": 0.25}, "c": private(4.5), "d": private(1e308)})
    with in_process(folder) as coordinator:
        answers(coordinator, plain)
        [phase] = coordinator.get(f"{plain}/rounds/1")["phases"]
        assert [(update["metrics"].get("privacy_epsilon"), update["privacy"]) for update in phase["updates"]] == [
            (None, None)
        ] * 2
        assert phase["metrics"]["loss"] == pytest.approx(0.375)
        answers(coordinator, own)
        [phase] = coordinator.get(f"{own}/rounds/1")["phases"]
        [update] = phase["updates"]
        assert (update["client"], update["metrics"]) == ("c", {"steps": 1.0})
        assert (update["privacy"]["epsilon"], update["privacy"]["ledger_epsilon"]) == (None, 4.5)
        assert "the update of d: privacy" in phase["unreadable"][0] or "ledger_epsilon" in phase["unreadable"][0]
        next_updates_count_what_was_spent_before(coordinator, own)
    store = Database(SQLite(folder / SQLITE_FILE))
    expect_this_version(store)
    store.close()


def next_updates_count_what_was_spent_before(coordinator: InProcess, federation: str) -> None:
    clients = [coordinator.client(federation, name) for name in ("c", "d")]
    for client, task in zip(clients, coordinator.training(clients), strict=True):
        update = update_body(trained(client.payload(task), client.name, task), task, metrics={}, privacy=SPENT)
        assert client.send(task, update).status_code == 201
    told = {one["client"]: one for one in coordinator.get(f"{federation}/privacy")["clients"]}
    assert told["c"]["spent"][0] is None
    assert told["c"]["spent"][1] == pytest.approx(4.845, abs=0.01)
    assert told["d"]["last"]["epsilon"] == pytest.approx(4.845, abs=0.01)
