"""Requests that wait: two of a client at most, none longer than its connection; small bodies need no place."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.engine.registry import Registry, Waits, Wakeups, wait
from promptfed.coordinator.http import json_bodies, uploads
from promptfed.coordinator.http.uploads import SMALL
from promptfed.testing.clients import ScriptedClient, content_digest, secret_of, trained, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import open_first_phase
from tests.support.waiting import PATIENCE, wait_for


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


def poll(coordinator: InThread, client: ScriptedClient) -> socket.socket:
    """A connection whose request waits for a task."""
    host, port = coordinator.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=20)
    head = (
        f"GET {client.path}/task?wait=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret_of(client.name)}\r\n\r\n"
    )
    opened.sendall(head.encode())
    return opened


def waiting(coordinator: InThread) -> int:
    return int(coordinator.registry.metrics.waiting._value.get())


def test_a_client_holds_two_requests_and_none_without_its_connection(coordinator: InThread) -> None:
    federation = coordinator.create()
    [a] = coordinator.enrol(federation, "a")
    begun = []
    for number in range(4):
        begun.append(poll(coordinator, a))
        wait_for("it waits", lambda number=number: waiting(coordinator) == min(number + 1, 2))
    for older in begun[:2]:
        assert older.recv(100).startswith(b"HTTP/1.1 204")
    for left in begun:
        left.close()
    wait_for("nobody waits", lambda: waiting(coordinator) == 0)


def test_small_bodies_go_past_those_that_keep_all_places(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BEHIND_SECONDS", 2.0)
    _, (a, b), (task, other) = open_first_phase(coordinator)
    host, port = coordinator.url.removeprefix("http://").split(":")
    body = update_body(trained(b.payload(other), "b", other), other)
    slow = []
    for _ in range(coordinator.settings.max_uploads):
        opened = socket.create_connection((host, int(port)), timeout=20)
        head = (
            f"PUT {a.path}/tasks/{task['task_id']}/update HTTP/1.1\r\nHost: x\r\nContent-Length: {SMALL + 1}\r\n"
            f"Authorization: Bearer {secret_of('a')}\r\nContent-Digest: {content_digest(body)}\r\n\r\n."
        )
        opened.sendall(head.encode())
        slow.append(opened)
    begun = time.monotonic()
    assert b.send(other, body).status_code == 201
    assert slow[0].recv(100).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - begun < 60, "and not after the 300 s that a long body may take"
    for opened in slow:
        opened.close()


def test_slow_json_of_a_client_is_bounded_in_number_and_time(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_bodies, "BEHIND_SECONDS", 2.0)
    _, (a, b), (task, other) = open_first_phase(coordinator)
    host, port = coordinator.url.removeprefix("http://").split(":")
    slow = []
    for _ in range(uploads.OF_ONE_CLIENT + 1):
        opened = socket.create_connection((host, int(port)), timeout=20)
        head = (
            f"POST {a.path}/tasks/{task['task_id']}/failure HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {secret_of('a')}\r\n\r\n{{"
        )
        opened.sendall(head.encode())
        slow.append(opened)
    answers = [opened.recv(100)[:12] for opened in slow]
    assert sorted(answers) == [b"HTTP/1.1 408"] * uploads.OF_ONE_CLIENT + [b"HTTP/1.1 503"]
    assert b.send(other, update_body(trained(b.payload(other), "b", other), other)).status_code == 201
    for opened in slow:
        opened.close()


def test_an_operator_has_sixteen_streams(coordinator: InThread) -> None:
    federation = coordinator.create()
    host, port = coordinator.url.removeprefix("http://").split(":")
    path = (
        f"GET /v1/federations/{federation}/events HTTP/1.1"
        if "/" not in federation
        else f"GET {federation}/events HTTP/1.1"
    )
    head = f"{path}\r\nHost: x\r\nAuthorization: {coordinator.operator['Authorization']}\r\n\r\n"
    begun = []
    for _ in range(20):
        begun.append(socket.create_connection((host, int(port)), timeout=20))
        begun[-1].sendall(head.encode())
        assert begun[-1].recv(100).startswith(b"HTTP/1.1 200")
    wait_for("the oldest have ended", lambda: sum(map(len, coordinator.registry.streams.values())) == 16)
    for left in begun:
        left.close()


def test_a_wait_ends_with_its_caller_or_newer_ones_and_is_counted_meanwhile() -> None:
    counted, woken = list[int](), list[object]()
    gauge: Any = SimpleNamespace(inc=lambda: counted.append(1), dec=lambda: counted.append(-1))
    wakeups: Any = SimpleNamespace(wake=woken.extend)
    waits = Waits(wakeups, gauge)
    messages: list[str] = ["http.request", "http.request", "http.disconnect"]

    async def gone() -> Any:
        await asyncio.sleep(0)
        return {"type": messages.pop(0)}

    async def stays() -> Any:
        await asyncio.sleep(PATIENCE)

    async def live() -> None:
        with waits.begun("a", None) as none:
            assert (none.over, counted, waits._by_key) == (False, [], {}), "it does not wait"
        with waits.begun("a", gone) as left:
            for _ in range(9):
                await asyncio.sleep(0)
            assert (left.over, woken, messages) == (True, ["a"], [])
        assert waits._by_key == {}
        woken.clear()
        with waits.begun("a", stays) as first, waits.begun("b", stays) as other, waits.begun("a", stays) as second:
            assert woken == []
            with waits.begun("a", stays) as third:
                assert [one.over for one in (first, other, second, third)] == [True, False, False, False]
                assert woken == ["a"]
                assert sum(counted) == 4
            assert sum(counted) == 3
        assert (sum(counted), waits._by_key) == (0, {})

    asyncio.run(live())


def test_a_wakeup_is_missed_by_nobody() -> None:
    async def live() -> None:
        wakeups = Wakeups()
        for name in ("a", "b"):
            assert wakeups.listen(name) is wakeups.listen(name)
        a, b = wakeups.listen("a"), wakeups.listen("b")
        wakeups.wake(["a", "nobody"])
        assert (a.is_set(), b.is_set(), wakeups.listen("a").is_set()) == (True, False, False)
        wakeups.wake_all()
        assert b.is_set()
        assert not wakeups.closed
        c = wakeups.listen("c")
        wakeups.close()
        assert (c.is_set(), wakeups.closed, wakeups.listen("d").is_set()) == (True, True, True)
        assert [await wait(c, PATIENCE), await wait(asyncio.Event(), 0.0)] == [True, False]

    asyncio.run(live())


@pytest.mark.parametrize(
    ("why", "reloading", "away"),
    [(None, False, False), ("gone", False, True), (None, True, True), ("gone", True, True)],
)
def test_the_store_is_away_until_what_it_holds_is_taken_up_again(why: str | None, reloading: bool, away: bool) -> None:
    registry: Any = SimpleNamespace(database=SimpleNamespace(away=why), _reloading=reloading)
    assert Registry.away.__get__(registry) is away
