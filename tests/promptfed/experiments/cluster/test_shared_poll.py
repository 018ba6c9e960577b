"""One stream of events in the place of a long poll for each client: who is named polls, nobody else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from promptfed.experiments.cluster import shared_poll
from promptfed.experiments.cluster.shared_poll import (
    SHORT_POLL,
    Announcements,
    ServerEvent,
    SharedPoll,
    events_of,
    following,
)
from tests.support.fake_coordinator import until
from tests.support.waiting import PATIENCE

POLL = "http://coordinator/v1/federations/f/task?wait=30"


def event(kind: str, /, **data: object) -> ServerEvent:
    return ServerEvent("1", kind, data)


def opened(*names: str) -> ServerEvent:
    return event("phase-opened", round=1, phase="p", kind="train", asked=list(names))


class Recorded(httpx.AsyncBaseTransport):
    """Answers from ``answer``, and remembers what was asked."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]):
        self.requests: list[httpx.Request] = []
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._answer(request)


def nothing(request: httpx.Request) -> httpx.Response:
    return httpx.Response(204)


async def poll(http: httpx.AsyncClient, token: str = "a" * 64, url: str = POLL) -> int:
    return (await http.get(url, headers={"Authorization": f"Bearer {token}"})).status_code


def sure(*names: str) -> Announcements:
    """Of clients who have looked once."""
    asked = Announcements(names)
    for name in names:
        assert asyncio.run(asked.wait(name, 0)) == 0
    return asked


def test_a_client_looks_once_and_then_waits_until_it_is_named() -> None:
    asked = sure("north", "south")
    assert asyncio.run(asked.wait("north", 0.01)) is None
    asked.tell(opened("south", "of another crew"))
    assert asyncio.run(asked.wait("north", 0.01)) is None
    assert asyncio.run(asked.wait("south", 0.01)) == SHORT_POLL


def test_who_waits_is_woken() -> None:
    async def played() -> int | None:
        asked = Announcements(["north"])
        await asked.wait("north", 0)
        waiting = asyncio.create_task(asked.wait("north", PATIENCE))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        asked.tell(event("clients-asked", round=1, phase="p", kind="train", asked=["north"]))
        return await waiting

    assert asyncio.run(played()) == SHORT_POLL


@pytest.mark.parametrize(
    "over", [event("task-settled", client="north", status="answered"), event("phase-completed", round=1)]
)
def test_what_is_settled_is_asked_no_longer(over: ServerEvent) -> None:
    asked = sure("north")
    asked.tell(opened("north"))
    asked.tell(over)
    assert asyncio.run(asked.wait("north", 0.01)) is None


@pytest.mark.parametrize(
    "over",
    [
        event("task-settled", client="north", status="expired"),
        event("federation-state", state="cancelled", reason=None),
    ],
)
def test_who_carries_out_a_task_waits_without_a_socket_until_it_is_settled(over: ServerEvent) -> None:
    asked, questions = sure("north"), ["carrying=t&progress=0.25&wait=", "carrying=t&progress=0.75&wait="]
    statuses = iter([204, 204, 409])
    inner = Recorded(lambda request: httpx.Response(next(statuses)))
    url = "http://coordinator/v1/federations/f/task?"

    async def played() -> None:
        async with httpx.AsyncClient(transport=SharedPoll(inner, asked, {"a" * 64: "north"})) as http:
            assert await poll(http, url=f"{url}{questions[0]}0.01") == 204
            asked.tell(event("task-settled", client="south", status="answered"))
            assert [request.url.query.decode() for request in inner.requests] == [f"{questions[0]}0"]
            waiting = asyncio.create_task(poll(http, url=f"{url}{questions[1]}{PATIENCE}"))
            await until(lambda: len(inner.requests) == 2)
            asked.tell(over)
            assert await waiting == 409

    asyncio.run(played())
    assert len(inner.requests) == 3
    assert asked._working == {}


def test_at_the_end_all_look_however_often() -> None:
    asked = sure("north", "south")
    asked.tell(event("federation-state", state="paused", reason="operator"))
    assert asyncio.run(asked.wait("north", 0.01)) is None
    asked.tell(event("federation-state", state="finished", reason=None))
    for _ in range(2):
        assert asyncio.run(asked.wait("north", 0.01)) == 0


def test_who_is_withdrawn_or_reset_asks_why() -> None:
    asked = sure("north", "south")
    asked.tell(event("client-withdrawn", client="north", discard=False))
    assert asyncio.run(asked.wait("north", 0.01)) == 0
    assert asyncio.run(asked.wait("south", 0.01)) is None


def test_only_polls_of_the_crews_own_clients_wait_here() -> None:
    asked, inner = sure("north"), Recorded(nothing)

    async def played() -> None:
        async with httpx.AsyncClient(transport=SharedPoll(inner, asked, {"a" * 64: "north"})) as http:
            assert await poll(http, "b" * 64) == 204  # somebody else's
            assert await poll(http, url="http://coordinator/v1/federations/f/task?wait=0") == 204
            assert await poll(http, url="http://coordinator/v1/federations/f/tasks/t/payload?wait=9") == 204
            assert [request.url.query for request in inner.requests] == [b"wait=30", b"wait=0", b"wait=9"]
            inner.requests.clear()
            url = POLL.replace("30", "0.01")
            assert await poll(http, url=url) == 204
            assert inner.requests == []
            asked.tell(opened("north"))
            assert await poll(http) == 204
            assert [str(request.url) for request in inner.requests] == [POLL.replace("30", str(SHORT_POLL))]
            assert inner.requests[0].headers["authorization"] == "Bearer " + "a" * 64

    asyncio.run(played())


def test_a_task_that_was_handed_over_is_not_asked_for_again() -> None:
    asked = sure("north")
    inner = Recorded(lambda request: httpx.Response(200, json={"task_id": "t"}, headers={"x-of": "the coordinator"}))

    async def played() -> None:
        async with httpx.AsyncClient(transport=SharedPoll(inner, asked, {"a" * 64: "north"})) as http:
            asked.tell(opened("north"))
            answer = await http.get(POLL, headers={"Authorization": "Bearer " + "a" * 64})
            assert (answer.json(), answer.headers["x-of"]) == ({"task_id": "t"}, "the coordinator")
        assert await asked.wait("north", 0.01) is None

    asyncio.run(played())


def test_requests_share_a_bounded_number_of_sockets() -> None:
    at_once: list[int] = []
    open_now = 0

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal open_now
            open_now += 1
            at_once.append(open_now)
            await asyncio.sleep(0.001)
            open_now -= 1
            return httpx.Response(204)

    async def played() -> None:
        names = {f"{number:064x}": f"site-{number}" for number in range(100)}
        asked = Announcements(names.values())
        async with httpx.AsyncClient(transport=SharedPoll(Slow(), asked, names)) as http:
            await asyncio.gather(*(poll(http, token) for token in names))

    asyncio.run(played())
    assert len(at_once) == 100
    assert max(at_once) == shared_poll.SOCKETS


async def lines(text: str) -> AsyncIterator[str]:
    for line in text.splitlines():
        yield line


def test_the_stream_is_read_as_its_standard_says() -> None:
    text = (
        ': a comment\n\nid: 7\nevent: phase-opened\ndata: {"asked":\ndata: ["a"]}\n\nevent: ping\n\nid:8\ndata: {}\n\n'
    )

    async def read() -> list[ServerEvent]:
        return [one async for one in events_of(lines(text))]

    assert asyncio.run(read()) == [ServerEvent("7", "phase-opened", {"asked": ["a"]})]


def test_a_stream_that_breaks_off_goes_on_after_the_last_event_and_all_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_poll, "RECONNECT_SECONDS", (0.001, 0.002))
    parts: list[list[tuple[str, dict[str, object]]]] = [
        [("phase-opened", {"asked": ["north"]})],
        [],
        [("federation-state", {"state": "finished", "reason": None})],
    ]
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        number = len(seen)
        seen.append(request.headers.get("last-event-id"))
        assert request.headers["authorization"] == "Bearer viewer"
        if number == 1:
            raise httpx.ReadError("cut")
        told = [f"id: {number + 5}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in parts[number]]
        return httpx.Response(200, text="".join(told))

    async def played() -> None:
        asked = Announcements(["north", "south"])
        await asked.wait("south", 0)
        async with (
            httpx.AsyncClient(transport=Recorded(answer)) as http,
            following(http, "http://coordinator/v1/federations/f/events", "viewer", asked),
        ):
            assert await asked.wait("south", PATIENCE) == 0
            while not asked.ended:
                assert await asked.wait("south", PATIENCE) == 0

    asyncio.run(played())
    assert seen == [None, "5", "5"]
