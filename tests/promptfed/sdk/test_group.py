"""The operator's client of several coordinators: it goes on when one of them is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from promptfed.sdk import client as sdk_client
from promptfed.sdk.client import CommandError, Coordinator, Exit, Request
from promptfed.shared.api.api_schemas import Health
from promptfed.shared.service.net import TOLD
from tests.support.waiting import PATIENCE

A, B = "https://a.example", "https://b.example"
READ, ACT = Request("GET", "/v1/federations/f", Health), Request("POST", "/v1/federations/f/start", Health)

Handler = Callable[[httpx.Request], httpx.Response]


def silent(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing comes", request=request)


def fine(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"status": "ok"})


def moving(request: httpx.Request) -> httpx.Response:
    kind = "https://promptfed.invalid/problems/federation-moving"
    return httpx.Response(503, json={"type": kind, "detail": "wait"})


class Group:
    """Coordinators by host, and which of them was asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **handlers: Handler):
        self.handlers = handlers
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(sdk_client, "RETRY_SECONDS", 0.0)
        monkeypatch.setattr(sdk_client, "TAKEOVER_SECONDS", 0.3)

    def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host.partition(".")[0]
        self.asked.append((host, request.url.path.rpartition("/")[2]))
        return self.handlers[host](request)

    def api(self, given: str) -> Coordinator:
        api = Coordinator(given, "token")
        api._http = httpx.Client(transport=httpx.MockTransport(self.answer))
        return api


def test_what_only_reads_is_asked_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=fine)
    api = group.api(f"{A}, {B}/")
    assert api.send(READ).view.status == "ok"
    assert group.asked == [("a", "f"), ("a", "readyz"), ("b", "f")]
    api.send(READ)
    assert group.asked[-1] == ("b", "f")


def test_what_changes_something_is_sent_to_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=fine)
    assert group.api(f"{A},{B}").send(ACT).view.status == "ok"
    assert group.asked == [("a", "readyz"), ("b", "readyz"), ("b", "start")]


def test_who_needs_long_but_is_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200)
        limits.append(request.extensions["timeout"]["read"])
        return silent(request) if len(limits) < 3 else fine(request)

    group = Group(monkeypatch, a=slow, b=fine)
    assert group.api(f"{A},{B}").send(READ).view.status == "ok"
    assert limits == [5, 10, 20]
    assert "b" not in dict(group.asked)


def test_a_change_is_given_up_soon_where_its_coordinator_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "QUIET_SECONDS", 0.05)
    hangs, healthy = threading.Event(), iter([True, True])

    def hanging(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200) if next(healthy, False) else silent(request)
        assert hangs.wait(PATIENCE)
        return fine(request)

    group = Group(monkeypatch, a=hanging, b=fine)
    begun = time.monotonic()
    with pytest.raises(CommandError, match=f"{A} took the request and gives no answer") as refusal:
        group.api(f"{A},{B}").send(ACT)
    assert time.monotonic() - begun < PATIENCE / 2
    assert refusal.value.exit is Exit.UNREACHABLE
    assert group.asked.count(("a", "start")) == 1, "it is not sent twice"
    assert ("b", "start") not in group.asked
    hangs.set()


def test_a_change_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_client, "QUIET_SECONDS", 0.05)
    asked = threading.Semaphore(0)

    def slow(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            asked.release()
            return httpx.Response(200)
        assert all(asked.acquire(timeout=PATIENCE) for _ in range(4))
        return fine(request)

    assert Group(monkeypatch, a=slow, b=fine).api(f"{A},{B}").send(ACT).view.status == "ok"


def test_a_takeover_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def takes_over(request: httpx.Request) -> httpx.Response:
        nonlocal turns
        turns += 1
        elsewhere = httpx.Response(307, headers={"Location": f"{A}{request.url.path}"})
        return {1: elsewhere, 2: moving(request)}.get(turns, fine(request))

    group = Group(monkeypatch, a=silent, b=takes_over)
    assert group.api(f"{A},{B}").send(READ).view.status == "ok"
    assert group.asked.count(("a", "f")) == 1, "a redirect to who was silent just now is not followed"


def test_addresses_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    def telling(request: httpx.Request) -> httpx.Response:
        response = fine(request)
        response.headers[TOLD] = f"{A}, {B}, http://c.example"
        return response

    group = Group(monkeypatch, a=telling, b=fine)
    api = group.api(A)
    api.send(READ)
    group.handlers["a"] = silent
    assert api.send(READ).view.status == "ok"
    assert group.asked[-1] == ("b", "f")
    assert api._book.all == [A, B]


def test_if_nobody_answers_all_addresses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=silent, b=silent)
    with pytest.raises(CommandError, match=f"cannot reach the coordinator at {A},{B}") as refusal:
        group.api(f"{A},{B}").send(READ)
    assert refusal.value.exit is Exit.UNREACHABLE


def test_one_coordinator_alone_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, a=moving)
    with pytest.raises(CommandError, match="wait"):
        group.api(A).send(READ)
    assert group.asked == [("a", "f")]


@pytest.mark.parametrize("url", [f"{A},http://b.example", f"http://b.example,{A}"])
def test_every_address_is_protected(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(CommandError, match=r"http://b\.example would carry the operator token unencrypted"):
        Coordinator(url, "token")
