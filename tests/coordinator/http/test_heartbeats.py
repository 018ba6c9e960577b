"""Polls that asked for heartbeats: white space while they wait, and every answer as before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from promptfed.coordinator.http import heartbeats
from promptfed.coordinator.http.heartbeats import Heartbeats
from promptfed.shared.messages import Task
from promptfed.shared.service.addresses import HEARTBEAT
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread


@pytest.fixture
def coordinator(served: InThread, monkeypatch: pytest.MonkeyPatch) -> InThread:
    """On a real socket, with a heartbeat every tenth of a second."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.1)
    return served


def poll(coordinator: InThread, federation: str, client: ScriptedClient, wait: float, by_route: bool = False) -> Any:
    """The stream of a poll's answer. A route declared with FastAPI answers if the query is unusual."""
    headers = client.headers | {HEARTBEAT: "2"}
    more = "&x=1" if by_route else ""
    url = f"{coordinator.url}/v1/federations/{federation}/task?wait={wait:g}{more}"
    return httpx.stream("GET", url, headers=headers, timeout=10)


@pytest.mark.parametrize("by_route", [False, True])
def test_white_space_then_the_task(coordinator: InThread, by_route: bool) -> None:
    federation = coordinator.create()
    a, _ = coordinator.enrol(federation, "a", "b")
    with poll(coordinator, federation, a, 30, by_route) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers
        parts = answer.iter_raw()
        assert [next(parts).strip() for _ in range(3)] == [b""] * 3
        coordinator.post(f"{federation}/start")
        body = b"".join(parts)
    assert Task.model_validate_json(body).round == 0
    assert poll_whole(coordinator, federation, a, by_route).status_code == 200, "a task that is there comes at once"
    assert poll_whole(coordinator, federation, a, by_route).content.startswith(b"{")


def poll_whole(
    coordinator: InThread, federation: str, client: ScriptedClient, by_route: bool = False
) -> httpx.Response:
    with poll(coordinator, federation, client, 0.3, by_route) as answer:
        answer.read()
    return answer


@pytest.mark.parametrize("by_route", [False, True])
def test_without_a_task_there_is_white_space_alone(coordinator: InThread, by_route: bool) -> None:
    federation = coordinator.create()
    [a] = coordinator.enrol(federation, "a")
    begun = time.monotonic()
    answer = poll_whole(coordinator, federation, a, by_route)
    assert time.monotonic() - begun >= 0.3
    assert (answer.status_code, answer.content.strip()) == (200, b"")
    assert len(answer.content) >= 2
    assert a.task(wait=0.2).status_code == 204, "who has not asked for heartbeats gets none"


def test_what_ends_a_poll_is_told_by_the_next_one(coordinator: InThread) -> None:
    federation = coordinator.create()
    [a] = coordinator.enrol(federation, "a")
    with poll(coordinator, federation, a, 30) as answer:
        assert answer.status_code == 200
        coordinator.post(f"{federation}/cancel")
        assert b"".join(answer.iter_raw()).strip() == b""
    assert poll_whole(coordinator, federation, a).status_code == 410


class Polls:
    """A registry that may have lost its leases."""

    def __init__(self) -> None:
        self.away = False
        self.woken = 0
        self.wakeups = self

    def wake_all(self) -> None:
        self.woken += 1


def test_one_who_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.02)
    polls, sent = Polls(), []

    async def full(message: object) -> None:
        await asyncio.sleep(3600)

    async def free(message: object) -> None:
        sent.append(message)

    async def play() -> None:
        beats = Heartbeats(polls)
        with beats.sent_by(full), beats.sent_by(free):
            await asyncio.sleep(0.2)
            assert len(sent) >= 2
            polls.away = True
            await asyncio.sleep(0.05)
            sent.clear()
            await asyncio.sleep(0.1)
            assert not sent, "without leases nobody is told that this coordinator is there"
            assert polls.woken == 1

    asyncio.run(play())
