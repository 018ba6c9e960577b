"""What is too long, late or ambiguous, on a connection without a network: both sides of each bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from promptfed.shared.service import http_connection
from promptfed.shared.service.http_connection import LimitedHttpProtocol

GET, POST = b"GET /a HTTP/1.1\r\nHost: x\r\n", b"POST /a HTTP/1.1\r\nHost: x\r\n"
BODY, CHUNKED = b"\r\n3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked\r\n"


class Line(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = self.aborted = self.at_the_end = False

    def write(self, data: Any) -> None:
        assert not self.closing, "a closed transport takes nothing"
        self.written.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        """Nothing is read here."""

    resume_reading = pause_reading


App = Callable[[Any, Any, Any], Any]


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what was sent."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def waiting(scope: Any, receive: Any, send: Any) -> None:
    """Never answers."""
    await asyncio.Event().wait()


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """Answers before it has read the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


def spoken(*parts: bytes, app: App = answering) -> tuple[Line, int | None]:
    """What comes back where ``parts`` arrive one after the other, and within how many seconds the rest must come."""

    async def talk() -> tuple[Line, int | None]:
        line, config = Line(), Config(app, lifespan="off", log_config=None)
        config.load()
        protocol = LimitedHttpProtocol(config, ServerState(), {})
        protocol.connection_made(line)
        for part in parts:
            if not line.closing:
                protocol.data_received(part)
            for _ in range(20):
                await asyncio.sleep(0)
        timer, line.at_the_end = protocol._overdue, line.closing
        seconds = None if timer is None else round(timer.when() - asyncio.get_running_loop().time())
        for task in list(protocol.tasks):
            task.cancel()
        protocol.connection_lost(None)
        assert protocol._overdue is None
        assert timer is None or timer.cancelled()
        return line, seconds

    return asyncio.run(talk())


def statuses(line: Line) -> list[int]:
    return [int(part[:3]) for part in b"".join(line.written).split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (GET + b"\r\n", 200),
        (POST + CHUNKED + BODY, 200),
        (b"GET /a HTTP/1.0\r\n\r\n", 200),
        (b"GET /a HTTP/1.0\r\nHost: x\r\n\r\n", 200),
        # What can be read in two ways.
        (POST + b"Host: y\r\n" + BODY, 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n" + BODY, 400),
        (POST + b"Content-Length: 3\r\n" + CHUNKED + BODY, 400),
        (POST + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + BODY, 400),
        # What a proxy could take for another request.
        (b"GET http://x/a HTTP/1.1\r\nHost: y\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    ],
)
def test_a_head_with_two_meanings_is_refused(sent: bytes, status: int) -> None:
    line, _ = spoken(sent)
    assert statuses(line) == [status]
    assert line.at_the_end == (status == 400 or b"/1.0" in sent)


@pytest.mark.parametrize(
    ("at_most", "parts", "found", "closed"),
    [
        # The path, names and values of a head count: "/a", "Host", "x", "A" and the x's.
        (72, [GET + b"A: " + b"x" * 64 + b"\r\n\r\n"], [200], False),
        (71, [GET + b"A: " + b"x" * 64 + b"\r\n\r\n"], [400], True),
        # Of a head without end its bytes as they are.
        (len(GET) + 16, [GET + b"A: " + b"x" * 13], [], False),
        (len(GET) + 15, [GET + b"A: " + b"x" * 13], [400], True),
        (len(GET) + 16, [GET, b"A: " + b"x" * 13], [], False),
        (len(GET) + 15, [GET, b"A: " + b"x" * 13], [400], True),
        # Behind a request's end only what follows counts; its answer is under way.
        (len(GET), [GET + b"\r\n" + GET], [200], False),
        (len(GET) - 1, [GET + b"\r\n" + GET], [], True),
        (len(GET) + 5, [GET + b"\r\n", GET + b"A: xy"], [200], False),
        (len(GET) + 4, [GET + b"\r\n", GET + b"A: xy"], [200, 400], True),
        # Extensions of chunks and trailers: what came in one piece since the last part of a body.
        (80, [POST + CHUNKED + b"\r\n", b"1;a=" + b"x" * 76], [], False),
        (80, [POST + CHUNKED + b"\r\n", b"1;a=" + b"x" * 77], [], True),
        (80, [POST + CHUNKED + b"\r\n", *[b"1;a=" + b"x" * 40 + b"\r\n \r\n"] * 3, b"0\r\n\r\n"], [200], False),
        (80, [POST + CHUNKED + b"\r\n", b"0\r\n", b"A: " + b"x" * 40, b"x" * 40], [], True),
        (80, [POST + CHUNKED + b"\r\n", b"0\r\n", b"A: " + b"x" * 77], [], False),
        (80, [POST + CHUNKED + b"\r\n", b"0\r\n", b"A: " + b"x" * 78], [], True),
        (80, [POST + CHUNKED + b"\r\n", b"1\r\na", b"\r\n1;a=" + b"x" * 74], [], False),
        (80, [POST + CHUNKED + b"\r\n", b"1\r\na", b"\r\n1;a=" + b"x" * 75], [], True),
        # Empty lines before a request are none of its head's.
        (len(GET), [b"\r\n\r\n" + GET], [], False),
        (len(GET) - 1, [b"\r\n\r\n" + GET], [400], True),
        (80, [POST + b"Content-Length: 90\r\n\r\n", b"x" * 30, b"x" * 60], [200], False),
    ],
)  # fmt: skip
def test_a_head_has_a_length(
    monkeypatch: pytest.MonkeyPatch, at_most: int, parts: list[bytes], found: list[int], closed: bool
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_BYTES", at_most)
    line, _ = spoken(*parts)
    assert (statuses(line), line.at_the_end) == (found, closed)


@pytest.mark.parametrize(
    ("bound", "at_most", "closed"), [("AHEAD", 3, False), ("AHEAD", 2, True), ("AHEAD_BYTES", 24, False),
                                     ("AHEAD_BYTES", 23, True)],
)  # fmt: skip
def test_what_is_sent_ahead_of_an_answer_has_bounds(
    monkeypatch: pytest.MonkeyPatch, bound: str, at_most: int, closed: bool
) -> None:
    """The first of five waits for its answer, and the next is the first that waits: three are counted, of 8 bytes."""
    monkeypatch.setattr(http_connection, bound, at_most)
    line, _ = spoken(*[GET + b"A: \r\n\r\n"] * 5, app=waiting)
    assert (line.at_the_end, line.aborted) == (closed, closed)
    assert line.written == []


def test_requests_ahead_are_answered_in_their_order() -> None:
    line, seconds = spoken((POST + b"Content-Length: 2\r\n\r\nab" + POST + b"Content-Length: 1\r\n\r\nc") * 2)
    assert [part.rpartition(b"\r\n")[2] for part in line.written] == [b"ab", b"c"] * 2
    assert seconds is None


@pytest.mark.parametrize(("parts", "app", "seconds"), [
    ([], answering, 100), ([GET], answering, 100), ([GET + b"\r\n"], answering, None),
    ([GET + b"\r\n"], waiting, None), ([GET + b"\r\n", GET], answering, 100), ([GET + b"\r\n", GET], waiting, None),
    ([POST + b"Content-Length: 2\r\n\r\na"], answering, None), ([POST + b"Content-Length: 2\r\n\r\na"], refusing, 200),
    ([POST + b"Content-Length: 2\r\n\r\na", b"b"], refusing, None),
    ([POST + b"Content-Length: 2\r\n\r\na", b"b" + GET], refusing, 100),
])  # fmt: skip
def test_time_runs_for_a_head_and_for_a_body_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, parts: list[bytes], app: App, seconds: int | None
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 100)
    monkeypatch.setattr(http_connection, "REST_SECONDS", 200)
    assert spoken(*parts, app=app)[1] == seconds


def test_a_body_is_taken_once_and_as_long_as_its_parts() -> None:
    cycle: Any = SimpleNamespace(body=bytearray(b"ab"), receive=None)
    parts = http_connection._Parts(cycle)
    assert cycle.body is parts
    for more, whole in ((b"cde", b"abcde"), (b"f", b"f")):
        parts += more
        assert (len(parts), bytes(parts), len(parts)) == (len(whole), whole, 0)


def test_a_head_goes_out_with_its_body_or_in_the_next_turn() -> None:
    async def write(*parts: bytes, closed: bool = False, wait: bool = False) -> tuple[list[bytes], bool, bool]:
        line = Line()
        answer = http_connection._HeadWithBody(line, asyncio.get_running_loop())
        for place, part in enumerate(parts):
            answer.write(part)
            assert place == 0 or line.written[-1].endswith(part), "behind its beginning nothing waits"
            if wait:
                await asyncio.sleep(0)
        if closed:
            answer.close()
        else:
            await asyncio.sleep(0)
        assert answer.is_closing() == line.is_closing()
        answer.abort()
        return line.written, closed, line.aborted

    assert asyncio.run(write(b"a", b"b", b"c")) == ([b"ab", b"c"], False, True)
    assert asyncio.run(write(b"a")) == ([b"a"], False, True)
    assert asyncio.run(write(b"a", b"b", wait=True)) == ([b"a", b"b"], False, True)
    assert asyncio.run(write(b"a", closed=True)) == ([b"a"], True, True)
