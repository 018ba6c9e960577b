"""What each answer says besides its content: the headers, whose turn it is, and the description of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator import problems
from promptfed.coordinator.http import callers, deps, openapi
from promptfed.coordinator.http.headers import with_headers
from promptfed.coordinator.http.waiting import InTurn
from promptfed.coordinator.problems import Refusal, StoreAway
from promptfed.shared.service.digests import field_of
from promptfed.shared.versions import PROTOCOL, VERSION

Message = dict[str, Any]
START, SIZE = "http.response.start", (b"content-length", b"4")


def body(content: bytes = b"body", more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


@pytest.mark.parametrize(
    ("path", "headers", "parts", "digested", "at_once"),
    [
        ("/v1/x", [SIZE], [body()], True, False),
        ("/v1/x", [SIZE], [body(b"")], False, False),
        ("/v1/x", [SIZE], [body(b"bo", True), body(b"dy")], False, False),
        ("/v1/x", [], [body()], False, True),
        ("/v1/x", [SIZE, (b"repr-digest", b"x")], [body()], False, True),
        ("/", [SIZE], [body()], False, True),
    ],
)
def test_answers_of_the_api_are_not_kept_and_have_a_digest(
    path: str, headers: list[Any], parts: list[Message], digested: bool, at_once: bool
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def answer() -> None:
        through = with_headers({"path": path}, send)
        await through(
            {"type": START, "headers": [*headers, (b"cache-control", b"mine"), (b"x-content-type-options", b"")]}
        )
        assert bool(sent) == at_once
        for part in parts:
            await through(part)

    asyncio.run(answer())
    assert sent[1:] == parts
    found, own = dict(sent[0]["headers"]), path != "/v1/x"
    assert found[b"x-content-type-options"] == b"nosniff"
    assert found[b"cache-control"] == (b"mine" if own else b"no-store")
    assert found.get(PROTOCOL.lower().encode()) == (None if own else str(VERSION).encode())
    assert found.get(b"content-digest") == (field_of(b"body").encode() if digested else None)


@pytest.mark.parametrize(
    ("kind", "path", "works", "lost_at", "status", "parts"),
    [
        ("http", "/v1/x", True, 9, 200, 2),
        ("http", "/v1/x", True, 0, 503, 1),
        ("http", "/v1/x", True, 1, 503, 1),
        ("http", "/v1/x", True, 2, 200, 1),
        ("http", "/v1/x", False, 9, 503, 1),
        ("http", "/v1/x", None, 9, 503, 1),
        ("http", "/healthz", False, 9, 200, 1),
        ("lifespan", "", None, 9, 200, 2),
    ],
)
def test_a_turn_that_ends_sends_nothing_more(
    kind: str, path: str, works: bool | None, lost_at: int, status: int, parts: int
) -> None:
    turn = SimpleNamespace(works=works) if works is not None else None
    sent: list[Message] = []

    async def app(scope: Any, receive: Any, send: Callable[..., Any]) -> None:
        for number, message in enumerate(({"type": START, "status": 200}, body(more=True), body())):
            if turn is not None and number == lost_at:
                turn.works = False
            await send(message)

    async def send(message: Message) -> None:
        if message["type"] == START:
            sent.clear()  # what was begun before is not sent by the server until a body comes
        sent.append(message)

    scope = {"type": kind, "path": path, "app": SimpleNamespace(state=SimpleNamespace(turn=turn))}
    asyncio.run(InTurn(app)(scope, None, send))
    assert (sent[0]["status"], len(sent) - 1) == (status, parts)


class SomethingWrong(Refusal, title="Something is wrong", status=418, retry_after=7):
    """A refusal of this test."""


class Other(SomethingWrong, title="Another", kind="its-own"):
    """One with its base's status."""


def test_refusals_say_what_they_are_and_when_to_come_again() -> None:
    assert (SomethingWrong.kind, SomethingWrong.status, SomethingWrong.retry_after) == ("something-wrong", 418, 7)
    assert (Other.kind, Other.status, Other.retry_after, Other.title) == ("its-own", 418, 7, "Another")
    assert problems.NotFound.retry_after is None
    refused = Other("why", errors=[1])
    assert (str(refused), refused.headers, refused.members) == ("why", {"Retry-After": "7"}, {"errors": [1]})
    assert Other("why", headers={"Retry-After": "1"}).headers == {"Retry-After": "1"}
    assert problems.NotFound("x").headers == {}
    assert problems.HttpError(418, "tea").status == 418


def test_refusals_are_described_once_by_status() -> None:
    every = {kind.status for kind in openapi.ANY_REQUEST}
    told = openapi.documented(SomethingWrong, Other, SomethingWrong)
    assert list(told) == sorted(every | {418})
    assert told[418]["description"] == "`something-wrong`: Something is wrong; `its-own`: Another"
    assert list(told[418]["content"]) == ["application/problem+json"]
    callers, clients = openapi.for_callers(SomethingWrong), openapi.for_clients(SomethingWrong)
    assert {kind.status for kind in openapi.ANY_CALLER} | {418} <= callers.keys()
    assert "`withdrawn`" in clients[403]["description"]
    assert "`withdrawn`" not in callers[403]["description"]
    read = openapi.body("text/csv", {"type": "string"})
    assert read == {"requestBody": {"required": True, "content": {"text/csv": {"schema": {"type": "string"}}}}}
    assert openapi.body("a/b", {}, "what")["requestBody"]["description"] == "what"
    assert openapi.router("/x", ["tag"]).prefix == "/x"


def test_dependencies_are_attributes_and_schemes() -> None:
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(thing=3)))
    assert asyncio.run(deps.of_app("thing")(request)) == 3
    caller = deps._OperatorCaller("viewer", "a name", "what it is")
    assert (caller.scheme_name, caller.model.description, caller._role) == ("a name", "what it is", "viewer")


def test_nobody_is_known_while_the_database_is_away() -> None:
    registry: Any = SimpleNamespace(away=True)
    connection: Any = None
    with pytest.raises(StoreAway):
        asyncio.run(callers.authenticate(connection, registry, "t"))
    with pytest.raises(StoreAway):
        callers.look_up(connection, registry, "t")


NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("operator", "left"),
    [
        (None, 0.0), ((NOW + timedelta(seconds=5), False), 5.0), ((NOW + timedelta(seconds=5), True), 0.0),
        ((NOW, False), 0.0), ((NOW - timedelta(seconds=5), False), 0.0),
    ],
)  # fmt: skip
def test_an_operator_s_right_ends_with_its_token(
    operator: tuple[datetime, bool] | None, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers.clock, "utc", lambda: NOW)
    held = {} if operator is None else {"t": SimpleNamespace(expires=operator[0], expired=operator[1])}
    registry: Any = SimpleNamespace(operators=held)
    assert callers.OperatorCaller("anna", "viewer", "t").seconds_left(registry) == left
    assert callers.OperatorCaller().seconds_left(registry) == float("inf"), "the first admin's never ends"


@pytest.mark.parametrize(
    ("caller", "scheme", "federation", "let_in"),
    [
        (callers.OperatorCaller("a", "viewer"), "viewer", None, True),
        (callers.OperatorCaller("a", "viewer"), "operator", None, False),
        (callers.OperatorCaller("a", "operator"), "viewer", None, True),
        (callers.OperatorCaller("a", "operator"), "admin", None, False),
        (callers.OperatorCaller(), "admin", None, True),
        (callers.OperatorCaller(), "client", "f", False),
        (callers.EnrollingCaller("f", "t"), "enrolment", "f", True),
        (callers.EnrollingCaller("f", "t"), "enrolment", "eyes", True),
        (callers.EnrollingCaller("f", "t"), "enrolment", "other", False),
        (callers.EnrollingCaller("f", "t"), "client", "f", False),
        (callers.EnrollingCaller("gone", "t"), "enrolment", "gone", False),
        (callers.ClientCaller("f", None, True), "client", "f", True),
        (callers.ClientCaller("f", None, False), "client", "f", False),
        (callers.ClientCaller("f", None, True), "enrolment", "f", False),
        (callers.ClientCaller("f", None, True), "viewer", "f", False),
    ],
)
def test_a_token_opens_its_own_scheme(caller: Any, scheme: str, federation: str | None, let_in: bool) -> None:
    registry: Any = SimpleNamespace(federations={"f": SimpleNamespace(id="f", name="eyes")})
    assert callers.is_let_in(caller, scheme, federation, registry) is let_in
