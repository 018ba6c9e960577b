"""What a client learns that asks while it carries out a task, and what its operator sees of it."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from promptfed.coordinator.engine import last_seen
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread
from tests.support.open_phases import answer_all, kind, open_first_phase
from tests.support.waiting import PATIENCE, wait_for


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, since questions are held back."""
    return served


def carries(client: ScriptedClient, task: dict[str, Any], wait: float = 0, **about: Any) -> httpx.Response:
    params = {"wait": wait, "carrying": task["task_id"], **about}
    return client.http.get(f"{client.path}/task", params=params, headers=client.headers)


def answered_later(client: ScriptedClient, task: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """A question that is held back, and where its answer goes."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(carries(client, task, 60)))
    thread.start()
    return thread, answers


def test_an_open_task_is_told_by_nothing_also_while_paused(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    assert carries(a, task).status_code == 204
    coordinator.post(f"{federation}/pause")
    assert carries(a, task).status_code == 204
    coordinator.post(f"{federation}/resume")
    assert carries(a, task).status_code == 204
    assert a.task().json()["task_id"] == task["task_id"], "whoever asks for its task is told it"


def test_who_is_too_late_is_told_at_once(coordinator: InThread) -> None:
    part = {"min_clients": 3, "quorum": 0.6, "deadline_seconds": 5}
    federation, clients, tasks = open_first_phase(coordinator, "a", "b", "c", rounds=1, participation=part)
    thread, answers = answered_later(clients[-1], tasks[-1])
    wait_for("the question", lambda: coordinator.registry.metrics.waiting._value.get() == 1)
    answer_all(clients[:2], tasks[:2])
    thread.join(PATIENCE)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert phase["expired"] == ["c"]
    assert (answers[0].status_code, kind(answers[0])) == (409, "phase-closed")
    views = coordinator.get(f"{federation}/clients")["clients"]
    assert [view["last_refusal"] for view in views] == [None] * 3, "it is none: the client has asked for it"


def test_the_end_of_the_federation_is_told_at_once(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    thread, answers = answered_later(a, task)
    wait_for("the question", lambda: coordinator.registry.metrics.waiting._value.get() == 1)
    coordinator.post(f"{federation}/cancel")
    thread.join(PATIENCE)
    assert (answers[0].status_code, kind(answers[0])) == (410, "federation-ended")


@pytest.mark.door
def test_a_task_that_its_answer_has_closed_and_the_next_one(coordinator: InThread) -> None:
    _, (a, b), (first, second) = open_first_phase(coordinator, rounds=2)
    thread, answers = answered_later(a, first)
    wait_for("the question", lambda: coordinator.registry.metrics.waiting._value.get() == 1)
    a.answer(first).raise_for_status()
    thread.join(PATIENCE)
    assert (answers[0].status_code, kind(answers[0])) == (409, "phase-closed")
    b.answer(second).raise_for_status()
    following = coordinator.task(a)
    told = carries(a, first)
    assert (told.status_code, told.json()["task_id"]) == (200, following["task_id"])


@pytest.mark.door
def test_progress_is_shown_for_the_open_task_alone(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, (a, b), (first, second) = open_first_phase(coordinator, rounds=2)

    def shown() -> dict[str, float | None]:
        return {one["name"]: one["progress"] for one in coordinator.get(federation)["awaited"]}

    assert shown() == {"a": None, "b": None}
    assert carries(a, first, progress=0.25).status_code == 204
    assert carries(b, first, progress=0.5).json()["task_id"] == second["task_id"], "the other one is not its task"
    assert shown() == {"a": 0.25, "b": None}
    for wrong in ("1.5", "-1", "nan", "x"):
        assert carries(a, first, progress=wrong).status_code == 422
    assert shown() == {"a": 0.25, "b": None}
    monkeypatch.setattr(last_seen, "PROGRESS_SECONDS", 0.0)
    assert shown() == {"a": None, "b": None}, "it was told long ago"
    coordinator.registry.last_seen.flush()
    assert coordinator.registry.last_seen._progress == {}
    monkeypatch.undo()
    assert carries(a, first, progress=0.5).status_code == 204
    for client, task in ((a, first), (b, second)):
        client.answer(task).raise_for_status()
    coordinator.training([a, b])
    assert shown() == {"a": None, "b": None}
