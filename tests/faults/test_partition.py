"""A network that gets in the way: whatever is lost, doubled, slow or cut off, nothing is counted twice or lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.coordinator.store.tables import StateRow, UpdateRow
from promptfed.shared.methods import METHODS
from promptfed.testing.clients import ScriptedClient, trained, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.proxy import ProxiedRequest, Proxy, Trouble
from tests.support.resending import ResendingApi, ResendingUnanswered
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE
from tests.support.whole_federation import run

ROUNDS = 2
TROUBLES: tuple[Trouble, ...] = (
    "no-answer", "half-an-answer", "slow-answer", "half-a-request", "slow-request", "refused", "twice",
    "twice-at-once", "late",
)  # fmt: skip


@pytest.fixture
def two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data") as server:
        yield server


def nothing(asked: ProxiedRequest) -> Trouble:
    return "none"


def now_and_then(
    seed: int, share: float = 0.5, troubles: tuple[Trouble, ...] = TROUBLES
) -> Callable[[ProxiedRequest], Trouble]:
    chance = random.Random(seed)
    return lambda asked: chance.choice(troubles) if chance.random() < share else "none"


def test_a_run_in_trouble_comes_to_what_an_undisturbed_run_comes_to(
    coordinator: InThread, tmp_path: Path, two_phase: None
) -> None:
    with in_thread(tmp_path / "undisturbed") as other:
        expected = run(other, "two_phase", ROUNDS)
    assert expected["state"] == "finished"
    with Proxy(coordinator.url, now_and_then(seed=3)) as proxy:
        unanswered = ResendingUnanswered(httpx.Client(base_url=proxy.url, timeout=PATIENCE))
        api = ResendingApi(unanswered, coordinator.operator)
        assert run(api, "two_phase", ROUNDS) == expected
        assert set(proxy.seen) == {"none", *TROUBLES}, "each happened"
        assert api.resent > 10
    with coordinator.registry.database.read() as session:
        updates = [row.task_id for row in session.query(UpdateRow)]
        phases = [row.phase_id for row in session.query(StateRow) if row.phase_id is not None]
    assert len(updates) == len(set(updates)) == sum(len(phase) for one in expected["counted"] for phase in one)
    assert len(phases) == len(set(phases)) == sum(len(one) for one in expected["counted"])


def opened_behind(
    proxy: Proxy, coordinator: InThread, **changes: Any
) -> tuple[str, list[ScriptedClient], list[dict[str, Any]]]:
    """A federation whose clients ``a`` and ``b`` reach it through the proxy; their first training tasks."""
    federation = coordinator.create(**changes)
    coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    http = httpx.Client(base_url=proxy.url, timeout=PATIENCE)
    clients = [ScriptedClient(http, federation, name) for name in ("a", "b")]
    return federation, clients, coordinator.training(clients)


@pytest.mark.parametrize("trouble", ["no-answer", "half-an-answer", "twice", "twice-at-once"])
def test_an_update_whose_answer_is_lost_or_that_comes_twice_counts_once(
    coordinator: InThread, trouble: Trouble
) -> None:
    with Proxy(coordinator.url, nothing) as proxy:
        federation, (a, b), (task, other) = opened_behind(proxy, coordinator, rounds=1)
        body = update_body(trained(a.payload(task), "a", task), task)
        proxy.trouble = lambda asked: trouble
        try:
            assert a.send(task, body).status_code in (200, 201)
        except httpx.TransportError:
            assert trouble in ("no-answer", "half-an-answer")
        proxy.trouble = nothing
        assert coordinator.get(federation)["answered"] == ["a"], "it was carried out"
        assert a.send(task, body).status_code == 200
        assert b.answer(other).status_code == 201
        coordinator.until(federation, phase="evaluation", round=1)
        [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
        assert [one["client"] for one in phase["updates"]] == ["a", "b"]
        assert a.send(task, body).status_code == 200, "and for ever"


def test_half_an_update_is_no_update(coordinator: InThread) -> None:
    with Proxy(coordinator.url, nothing) as proxy:
        federation, (a, _), (task, _) = opened_behind(proxy, coordinator)
        body = update_body(trained(a.payload(task), "a", task), task)
        proxy.trouble = lambda asked: "half-a-request"
        for _ in range(3):
            with pytest.raises(httpx.TransportError):
                a.send(task, body)
        proxy.trouble = nothing
        assert coordinator.get(federation)["answered"] == []
        wait_for(lambda: not list(coordinator.registry.blobs.incoming.iterdir()))
        assert a.send(task, body).status_code == 201


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_partition_ends_a_round_by_deadline_and_quorum(
    coordinator: InThread, leap: Callable[[InThread, float], None]
) -> None:
    """Client b is cut off with an open task; back again, its late update is refused and it goes on."""
    with Proxy(coordinator.url, nothing) as proxy:
        federation, (a, b), (task_a, task_b) = opened_behind(
            proxy, coordinator, rounds=2, participation={"quorum": 0.5, "deadline_seconds": 3600}
        )
        late = update_body(trained(b.payload(task_b), "b", task_b), task_b)
        proxy.trouble = lambda asked: "refused"
        with pytest.raises(httpx.TransportError):
            b.send(task_b, late)
        a.http = coordinator.http
        assert a.answer(task_a).status_code == 201
        leap(coordinator, 3600)
        coordinator.until(federation, round=1, phase="evaluation")
        proxy.trouble = nothing
        refused = b.send(task_b, late)
        assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "phase-closed")
        for client in (a, b):
            client.evaluate(coordinator.task(client))
        assert b.answer(coordinator.task(b)).status_code == 201
        assert a.answer(coordinator.task(a)).status_code == 201
        first, second = (coordinator.get(f"{federation}/rounds/{n}")["phases"][0] for n in (1, 2))
        assert ([one["client"] for one in first["counted"]], first["expired"]) == (["a"], ["b"])
        assert [one["client"] for one in second["updates"]] == ["a", "b"]


def test_clients_that_never_come_back_pause_the_federation_after_two_deadlines(
    coordinator: InThread, leap: Callable[[InThread, float], None]
) -> None:
    with Proxy(coordinator.url, nothing) as proxy:
        federation, _, _ = opened_behind(proxy, coordinator, participation={"deadline_seconds": 3600})
        proxy.trouble = lambda asked: "refused"
        leap(coordinator, 3600)
        wait_for(lambda: coordinator.get(federation)["stage"]["extended"])
        leap(coordinator, 3600)
        found = coordinator.until(federation, state="paused")
        assert found["reason"] == "quorum_missed"
        [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
        assert phase["extended"]


def test_slow_uploads_hold_up_neither_each_other_nor_anybody_else(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.coordinator.http.uploads.SMALL", 0)  # these stand for large ones
    with Proxy(coordinator.url, nothing) as proxy:
        federation, clients, tasks = opened_behind(proxy, coordinator)
        bodies = [
            update_body(trained(client.payload(task), client.name, task), task)
            for client, task in zip(clients, tasks, strict=True)
        ]
        paths = [f"{client.path}/tasks/{task['task_id']}/update" for client, task in zip(clients, tasks, strict=True)]
        proxy.trouble = lambda asked: "held-request"
        answers: dict[str, int] = {}

        def send(client: ScriptedClient, task: dict[str, Any], body: bytes) -> None:
            answers[client.name] = client.send(task, body).status_code

        threads = [threading.Thread(target=send, args=parts) for parts in zip(clients, tasks, bodies, strict=True)]
        for thread in threads:
            thread.start()
        wait_for(lambda: coordinator.app.state.uploads._running == 2)
        assert coordinator.http.get("/readyz").status_code == 200
        assert answers == {}
        proxy.let_go(paths[1])
        threads[1].join(PATIENCE)
        assert answers == {"b": 201}, "while a's is under way"
        assert coordinator.http.get("/readyz").status_code == 200
        proxy.let_go(paths[0])
        threads[0].join(PATIENCE)
        assert answers == {"a": 201, "b": 201}
        coordinator.until(federation, round=1, phase="evaluation")
