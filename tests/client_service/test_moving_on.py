"""Several coordinators: a client leaves one that is gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import connection
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.private_state import FILE, PrivateState, keep_known
from promptfed.shared.service import net
from promptfed.shared.service.net import TOLD
from promptfed.shared.spec.section import PROTOCOL, VERSION

A, B, C = "https://a.example", "https://b.example", "https://c.example"
GONE = 0.15

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", GONE)
    monkeypatch.setattr(net, "GONE_SECONDS", 60.0)
    monkeypatch.setattr(connection, "QUICK_BACKOFF", 0.01)


class Hosts:
    """Coordinators by their addresses; the requests that each was sent."""

    def __init__(self, **handlers: Handler):
        self.handlers = handlers
        self.asked: list[str] = []
        self.requests: list[httpx.Request] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        name = request.url.host.partition(".")[0]
        self.asked.append(name)
        answer = await self.handlers[name](request)
        answer.headers[PROTOCOL] = str(VERSION)
        return answer

    def client(self, given: str, **options: Any) -> CoordinatorClient:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return CoordinatorClient(http, given, "fed", token="secret", **options)


async def silent(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(request.extensions["timeout"]["read"])
    raise httpx.ReadTimeout("nothing was heard")


async def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


async def idle(request: httpx.Request) -> httpx.Response:
    return httpx.Response(204)


def moved(to: str) -> Handler:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(307, headers={"Location": to + request.url.raw_path.decode()})

    return answer


@pytest.mark.parametrize("gone", [silent, refused])
def test_a_poll_goes_to_the_next_one_and_stays_there(gone: Handler) -> None:
    hosts = Hosts(a=gone, b=idle)
    client = hosts.client(f"{A},{B}")

    async def play() -> float:
        begun = time.monotonic()
        assert await client.task(30) is None
        return time.monotonic() - begun

    assert asyncio.run(play()) < 20 * GONE
    assert hosts.asked == ["a", "b"]
    assert all(request.url.params["wait"] == "4" for request in hosts.requests), "soon another one can be asked"
    hosts.asked.clear()
    assert asyncio.run(client.task(30)) is None
    assert hosts.asked == ["b"]


def test_who_goes_silent_in_the_middle_of_an_answer_is_left() -> None:
    async def stops(request: httpx.Request) -> httpx.Response:
        async def begins() -> AsyncIterator[bytes]:
            yield b" "
            await silent(request)

        return httpx.Response(200, content=begins())

    hosts = Hosts(a=stops, b=idle)
    assert asyncio.run(hosts.client(f"{A},{B}").task(30)) is None
    assert hosts.asked == ["a", "b"]


def test_with_one_address_a_poll_waits_as_long_as_it_is_to() -> None:
    hosts = Hosts(a=idle)
    assert asyncio.run(hosts.client(A).task(30)) is None
    assert hosts.asked == ["a"]
    assert hosts.requests[0].url.params["wait"] == "30"
    assert hosts.requests[0].extensions["timeout"]["read"] == 45.0


def test_a_redirect_to_one_that_was_silent_is_not_followed() -> None:
    turns = 0

    async def takes_over(request: httpx.Request) -> httpx.Response:
        nonlocal turns
        turns += 1
        return await (moved(A) if turns < 3 else idle)(request)

    hosts = Hosts(a=silent, b=takes_over, c=moved(B))
    assert asyncio.run(hosts.client(f"{A},{B},{C}").task(30)) is None
    assert hosts.asked.count("a") == 1
    assert turns == 3


def test_a_503_is_not_waited_for_where_another_one_may_answer() -> None:
    async def away(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, headers={"Retry-After": "60"})

    hosts = Hosts(a=away, b=idle)
    begun = time.monotonic()
    assert asyncio.run(hosts.client(f"{A},{B}").task(30)) is None
    assert time.monotonic() - begun < 30


def telling(told: str, then: Handler) -> Handler:
    async def answer(request: httpx.Request) -> httpx.Response:
        response = await then(request)
        if response.status_code < 300:
            response.headers[TOLD] = told
        return response

    return answer


def test_addresses_that_were_told_are_kept_for_a_restart(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)

    def started(hosts: Hosts) -> CoordinatorClient:
        client = hosts.client(A)
        keep_known(client.book, state)
        return client

    asyncio.run(started(Hosts(a=telling(f"{A}, {B}", idle))).task(30))
    assert json.loads((tmp_path / FILE).read_text()) == [A, B]
    hosts = Hosts(a=refused, b=idle)
    assert asyncio.run(started(hosts).task(30)) is None
    assert hosts.asked == ["a", "b"]
    for damaged in (b"\xff", b"{}", b"[1]"):
        (tmp_path / FILE).write_bytes(damaged)
        assert started(Hosts()).book.all == [A]


def test_an_address_that_the_policy_does_not_list_is_not_used() -> None:
    def only_a(origin: str) -> None:
        if origin != A:
            raise ClientError(Exit.POLICY, "not listed")

    hosts = Hosts(a=telling(f"{A},{B}", idle), b=silent)
    client = hosts.client(A, may_move=only_a)
    asyncio.run(client.task(0))
    assert client.book.all == [A]


def test_a_refusal_tells_of_nobody() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, headers={TOLD: B})

    client = Hosts(a=answer).client(A)
    with pytest.raises(connection.Refused):
        asyncio.run(client.task(0))
    assert client.book.all == [A]


def test_several_addresses_are_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"federation": "f", "name": "n", "data": "d"}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PROMPTFED_CLIENT_COORDINATOR", f"{A}/, {B}")
    settings = make_settings(**given)
    assert settings.coordinator == f"{A},{B}"
    assert settings.first_coordinator == A
    assert settings.state_dir == tmp_path / "promptfed" / "a.example" / "f" / "n"
    (tmp_path / "promptfed" / "b.example" / "f" / "n").mkdir(parents=True)
    assert make_settings(**given).state_dir.parts[-3] == "b.example", "where this client has its state already"
    with pytest.raises(ClientError, match=r"http://c\.example would carry the client's secret"):
        make_settings(**given, coordinator=f"{A},http://c.example")
    with pytest.raises(ClientError, match="'c' is not an address"):
        make_settings(**given, coordinator=f"{A},c")
