"""How a client reads answers and waits: each status, limit and delay on both sides."""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import connection
from promptfed.client_service.http.connection import (
    CoordinatorConnection,
    Patience,
    Refused,
    Unavailable,
    _foreign,
    _retry_after,
)
from promptfed.client_service.http.coordinator_client import http_to
from promptfed.shared.messages import PROBLEM_BASE
from promptfed.shared.service.digests import Damaged
from promptfed.shared.versions import PROTOCOL, VERSION

ONE, TWO = "http://a:1", "http://a:1,http://b:1"


def line(base: str = ONE, **given: Any) -> CoordinatorConnection:
    return CoordinatorConnection(cast(Any, None), base, "fed", **given)


def answer(status: int, content: bytes | None = None, **headers: str) -> httpx.Response:
    body = {"type": f"{PROBLEM_BASE}kind", "title": "t", "status": status, "detail": "why"}
    about: dict[str, Any] = {"json": body} if content is None else {"content": content}
    names = {PROTOCOL: str(VERSION)} | {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=names, request=httpx.Request("GET", "http://a/x"), **about)


@pytest.mark.parametrize(("given", "raised", "said"), [
    (answer(200), None, ""), (answer(299), None, ""), (answer(400), Refused, "why (400 kind)"),
    (answer(499), Refused, "why"), (answer(500), Unavailable, "500 why"),
    (answer(503, b"x"), Unavailable, "503 Service"),
    (answer(429), Refused, "why"), (answer(429, retry_after="3"), Unavailable, "429 why"),
    (answer(404, b"x"), Damaged, "404 Not Found: its reason cannot be read"),
    (answer(302, location="http://b"), Refused, "redirects are not followed (to http://b) (302 redirect)"),
    (answer(200, **{PROTOCOL: "99.0"}), ClientError, ""),
    (answer(422, b'{"type": "%sdigest-mismatch", "title": "t", "status": 422, "detail": "d"}' % PROBLEM_BASE.encode()),
     Damaged, "a request arrived as something else: d"),
])  # fmt: skip
def test_what_an_answer_means(given: httpx.Response, raised: type[Exception] | None, said: str) -> None:
    if raised is None:
        assert line().take(given, given.content) is False, "without a digest nothing is proven"
        return
    with pytest.raises(raised) as error:
        line().take(given, given.content)
    assert said in str(error.value)
    assert not isinstance(error.value, ClientError) or error.value.exit is Exit.PROTOCOL


def test_bodies_are_read_to_a_limit() -> None:
    assert asyncio.run(line().read(answer(200, b"12345"), 5)) == b"12345"
    with pytest.raises(Damaged, match="the answer to GET /x is larger than 4 bytes"):
        asyncio.run(line().read(answer(200, b"12345"), 4))


@pytest.mark.parametrize(("status", "text", "seconds"), [
    (503, "7", 7.0), (429, "7", 7.0), (502, "7", None), (503, "", None), (503, "soon", None), (503, "-7", None),
    (503, "9" * 400, math.inf),
    (503, timedelta(hours=1), 3600.0), (503, timedelta(hours=-1), 0.0),
])  # fmt: skip
def test_a_retry_after_is_a_number_or_a_date(status: int, text: str | timedelta, seconds: float | None) -> None:
    sent = text if isinstance(text, str) else format_datetime(datetime.now(UTC) + text)
    found = _retry_after(answer(status, retry_after=sent))
    assert found == (seconds if seconds is None else pytest.approx(seconds, abs=60))


@pytest.mark.parametrize(("base", "attempt", "error", "least", "most"), [
    (ONE, 1, OSError(), 0.125, 0.25), (ONE, 4, OSError(), 1.0, 2.0), (ONE, 7, OSError(), 7.5, 15.0),
    (ONE, 99, OSError(), 7.5, 15.0), (TWO, 20, OSError(), 0.5, 1.0), (TWO, 21, OSError(), 7.5, 15.0),
    (ONE, 1, Unavailable(503, "", None), 0.125, 0.25), (ONE, 1, Unavailable(503, "", 40.0), 40.0, 40.25),
    (ONE, 1, Unavailable(503, "", 400.0), 300.0, 300.25), (TWO, 20, Unavailable(503, "", 40.0), 1.0, 1.25),
    (TWO, 20, Unavailable(429, "", 40.0), 40.0, 40.25), (TWO, 21, Unavailable(503, "", 40.0), 40.0, 40.25),
    (ONE, 1, Unavailable(503, "", 0.0), 0.0, 0.25),
])  # fmt: skip
def test_how_long_is_waited(base: str, attempt: int, error: Exception, least: float, most: float) -> None:
    """Jittered over the whole range: both its ends are reached."""
    for where, wanted in ((0.0, least), (1.0, most)):
        jitter = SimpleNamespace(uniform=lambda low, high, where=where: low + where * (high - low))
        assert line(base, _jitter=cast(Any, jitter)).backoff(attempt, error) == pytest.approx(wanted)


def test_patience_ends_so_long_after_what_moved_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, slept = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    longest = cast(Any, SimpleNamespace(uniform=lambda low, high: high))
    waiting = line(give_up_after=10.0, sleep=sleep, _served=ONE, _jitter=longest)
    patience = Patience(waiting)
    patience.moved()
    assert caplog.text == "", "nothing was wrong"
    for error, said in (
        (Damaged("half"), "is heard, but not as it was sent (half)"),
        (Unavailable(503, "busy", None), "(503 busy)"),
    ):
        clock[0] += 4.9
        asyncio.run(patience.wait(error))
        assert said in caplog.messages[-1]
    assert slept == [0.25, 0.5]
    clock[0] += 0.2
    with pytest.raises(ClientError, match="no answer from the coordinator at http://a:1: 503 busy") as end:
        asyncio.run(patience.wait(Unavailable(503, "busy", None)))
    assert end.value.exit is Exit.UNREACHABLE
    patience.moved()
    assert caplog.messages[-1] == "the coordinator at http://a:1 answers again"
    clock[0] += 9.9
    asyncio.run(patience.wait(Damaged("half")))
    assert slept[2:] == [0.25], "earlier failures are forgotten"
    clock[0] += 0.1
    with pytest.raises(ClientError, match=r"that can be used \(half\): "):
        asyncio.run(patience.wait(Damaged("half")))


def test_the_address_that_failed_is_the_one_that_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(connection, "explained", lambda error, address: asked.append(address))
    waiting = line(TWO)
    assert "no answer from the coordinator at" in str(waiting.unreachable(OSError("x")))
    waiting.addresses.failed = "http://b:1"
    waiting.explained(OSError("x"))
    assert asked == [TWO, "http://b:1"]


def test_who_serves_is_told_where_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    several, alone = line(TWO), line()
    for address, status in (("a", 500), ("a", 499), ("a", 200), ("b", 503), ("b", 200)):
        several._note_served(address, answer(status))
        assert several.has_served is not (status == 500)
    assert caplog.messages == ["the coordinator at b serves this client now"]
    given = httpx.Timeout(60.0, connect=10.0, pool=3.0)
    assert (alone._patient(given), several._patient(given)) == (given, httpx.Timeout(5.0, pool=3.0))


@pytest.mark.parametrize(("given", "said"), [
    (answer(302, location="http://b"), "somebody else redirects to http://b"),
    (answer(200, b"<TITLE lang=x>A &amp; B</title>"), "OK: the page 'A & B' of somebody else, not of a coordinator"),
    (answer(502, b"nothing"), "Bad Gateway: a body of somebody else, not of a coordinator"),
    (answer(413, b""), "not of a coordinator; something on the way takes no request of this size"),
    (answer(200, b" " * (64 << 10) + b"<title>late</title>"), "OK: a body of somebody else"),
    (answer(200, b" " * ((64 << 10) - 11) + b"<title>late</title>"), "OK: the page 'late' of somebody else"),
])  # fmt: skip
def test_what_somebody_else_says(given: httpx.Response, said: str) -> None:
    assert said in asyncio.run(_foreign(given))


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Any) -> None:
    for key, said in (
        (None, f"--client-cert {tmp_path} cannot"),
        (tmp_path, f"{tmp_path} and --client-key {tmp_path} cannot"),
    ):
        with pytest.raises(ClientError) as end:
            http_to("https://a", None, (tmp_path, key))
        assert (end.value.exit, said in str(end.value)) == (Exit.USAGE, True)
    with pytest.raises(ClientError) as end:
        http_to("https://a", tmp_path / "absent")
    assert end.value.exit is Exit.USAGE
