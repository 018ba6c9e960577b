"""Tasks that contain their payload, and receipts that wait for the next task and contain it."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from promptfed.coordinator.problems import StoreAway
from promptfed.coordinator.resources.tasks import polls
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import ScriptedClient, content_digest, drive, trained, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import answer_all, kind, open_first_phase
from tests.support.waiting import PATIENCE, wait_for


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, since answers are held back."""
    return served


def asked(client: ScriptedClient, inline: bool = True) -> dict[str, Any]:
    params = {"inline": str(inline).lower()}
    response = client.http.get(f"{client.path}/task", params=params, headers=client.headers)
    return dict(response.raise_for_status().json())


def update_of(client: ScriptedClient, task: dict[str, Any]) -> bytes:
    return update_body(trained(client.payload(task), client.name, task), task)


def sent(client: ScriptedClient, task: dict[str, Any], body: bytes, seconds: float = 60) -> httpx.Response:
    url = f"{client.path}/tasks/{task['task_id']}/update"
    headers = {**client.headers, "Content-Digest": content_digest(body)}
    return client.http.put(url, params={"next": seconds}, content=body, headers=headers, timeout=PATIENCE)


class Held:
    """An answer under way, in a thread."""

    def __init__(self, coordinator: InThread, client: ScriptedClient, task: dict[str, Any]):
        self.body, self.answers = update_of(client, task), list[httpx.Response]()
        self.thread = threading.Thread(target=lambda: self.answers.append(sent(client, task, self.body)))
        self.thread.start()
        wait_for("the answer to be held back", lambda: coordinator.registry.metrics.waiting._value.get() == 1)

    def answer(self) -> httpx.Response:
        self.thread.join(PATIENCE)
        return self.answers[0]


def test_a_task_contains_its_payload_for_who_asks_for_it(coordinator: InThread) -> None:
    federation, (a, b), (task, _) = open_first_phase(coordinator)
    assert "data" not in asked(a, inline=False)["payload"]
    whole = asked(a)
    content = base64.b64decode(whole["payload"].pop("data"), validate=True)
    assert decode(content)[0].keys() == a.payload(task).keys()
    assert whole["payload"] == task["payload"]
    assert len(content) == task["payload"]["bytes"]
    phase = coordinator.get(f"{federation}/rounds/1")["phases"][0]
    assert phase["bytes_down"] == 2 * len(content), "what came within a task counts as served, like what was fetched"
    assert asked(b)["payload"]["data"] == base64.b64encode(content).decode()


def test_a_large_payload_is_fetched(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    monkeypatch.setattr("promptfed.coordinator.resources.tasks.served.INLINE_BYTES", task["payload"]["bytes"])
    assert "data" in asked(a)["payload"]
    monkeypatch.setattr("promptfed.coordinator.resources.tasks.served.INLINE_BYTES", task["payload"]["bytes"] - 1)
    assert "data" not in asked(a)["payload"]


def test_a_receipt_waits_for_the_next_task_and_contains_it(coordinator: InThread) -> None:
    federation, (a, b), (first, second) = open_first_phase(coordinator, rounds=2)
    held = Held(coordinator, a, first)
    phase = coordinator.get(f"{federation}/rounds/1")["phases"][0]
    assert [update["client"] for update in phase["updates"]] == ["a"], "it counts before it is confirmed"
    again = sent(a, first, held.body, 0)
    assert (again.status_code, "next" in again.json()) == (200, False)
    body = update_of(b, second)
    told = sent(b, second, body).json()["next"]
    answer = held.answer()
    assert (answer.status_code, answer.json()["sha256"]) == (201, again.json()["sha256"])
    following = answer.json()["next"]
    assert (following["round"], following["kind"]) == (1, "evaluate")
    assert following["payload"]["data"] == told["payload"]["data"]
    plain = coordinator.task(a)
    del following["payload"]["data"], following["seconds_left"], plain["seconds_left"]
    assert following == plain, "the very task that a question is answered"
    repeated = sent(a, first, held.body).json()["next"]
    assert repeated["task_id"] == following["task_id"], "the same request has the same task"
    drive([a, b])
    assert coordinator.get(federation)["state"] == "finished"
    assert sent(a, first, held.body).status_code == 200, "a client that was stopped before it came is told later"


def test_an_evaluation_waits_too(coordinator: InThread) -> None:
    federation, clients, _ = open_first_phase(coordinator, rounds=1)
    answer_all(clients, [coordinator.task(client) for client in clients])
    a, b = clients
    tasks = [coordinator.task(client) for client in clients]
    assert {task["kind"] for task in tasks} == {"evaluate"}
    url = f"{a.path}/tasks/{tasks[0]['task_id']}/evaluation"
    body = {"splits": {"test": {"accuracy": 0.5, "num_samples": 20}}}
    started = time.monotonic()
    answer = a.http.put(url, params={"next": 0.3}, json=body, headers=a.headers)
    assert (answer.status_code, answer.json()) == (201, {"task_id": tasks[0]["task_id"], "status": "accepted"})
    assert time.monotonic() - started >= 0.3
    b.evaluate(tasks[1]).raise_for_status()
    assert coordinator.get(federation)["state"] == "finished"
    started = time.monotonic()
    ended = a.http.put(url, params={"next": 60}, json=body, headers=a.headers)
    assert (ended.status_code, time.monotonic() - started < 50) == (200, True), "there will be no next task"


@pytest.mark.parametrize(("verb", "path"), [("POST", "/cancel"), ("DELETE", "/clients/a"), ("DELETE", "")])
def test_what_ends_the_waiting_leaves_the_receipt(coordinator: InThread, verb: str, path: str) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    held = Held(coordinator, a, task)
    coordinator.http.request(verb, f"/v1/federations/{federation}{path}", headers=coordinator.operator)
    answer = held.answer()
    assert (answer.status_code, "next" in answer.json()) == (201, False)


def test_a_wait_that_is_none_is_refused_before_anything_counts(coordinator: InThread) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    body = update_of(a, task)
    headers = {**a.headers, "Content-Digest": content_digest(body)}
    for query in ("next=61", "next=-1", "next=soon", "next=", "nxt=15"):
        refused = a.http.put(f"{a.path}/tasks/{task['task_id']}/update?{query}", content=body, headers=headers)
        assert (refused.status_code, kind(refused)) == (422, "invalid-request")
        assert query.partition("=")[0] in json.dumps(refused.json()["errors"])
        assert not coordinator.get(f"{federation}/rounds/1")["phases"][0]["updates"]
    assert a.send(task, body).status_code == 201


def uploads() -> list[Upload]:
    return [one for one in gc.get_objects() if type(one) is Upload]


def test_no_update_is_kept_while_its_receipt_waits(coordinator: InThread) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)
    before = {id(one) for one in uploads()}
    held = Held(coordinator, a, task)
    gc.collect()
    assert not [one for one in uploads() if id(one) not in before]
    coordinator.post(f"{a.path}/cancel")
    assert held.answer().status_code == 201


def test_a_payload_for_who_has_hung_up_is_not_served(coordinator: InThread) -> None:
    federation, (a, b), (first, second) = open_first_phase(coordinator)
    url, body = f"{a.path}/tasks/{first['task_id']}/update", update_of(a, first)
    headers = {**a.headers, "Content-Digest": content_digest(body)}
    asking = {"params": {"next": 60}, "content": body, "headers": headers, "timeout": httpx.Timeout(PATIENCE, read=1)}
    with pytest.raises(httpx.ReadTimeout):
        a.http.put(url, **asking)
    assert a.http.put(url, **asking | {"timeout": PATIENCE}).status_code == 200, "what is repeated is not held"
    b.send(second, update_of(b, second)).raise_for_status()
    coordinator.task(a)
    size = asked(a)["payload"]["bytes"]
    assert coordinator.get(f"{federation}/rounds/1")["evaluation"]["bytes_down"] == size


def test_what_fails_while_a_receipt_waits_leaves_it(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator)

    async def away(*about: Any, **more: Any) -> None:
        raise OSError("the database is away")

    monkeypatch.setattr("promptfed.coordinator.resources.tasks.routes.next_task", away)
    answer = sent(a, task, update_of(a, task))
    assert (answer.status_code, "next" in answer.json()) == (201, False)


def test_who_waits_is_told_that_the_database_has_gone() -> None:
    registry = SimpleNamespace(away=True, waits=Mock(), wakeups=Mock())
    registry.waits.begun.return_value = nullcontext()
    app: Any = SimpleNamespace(state=SimpleNamespace(registry=registry))
    caller: Any = SimpleNamespace(federation=SimpleNamespace(id="f"), client=SimpleNamespace(name="a"))
    with pytest.raises(StoreAway):
        asyncio.run(polls.next_task(Mock(app=app), caller, 0))
