"""A server's side of one HTTP/1.1 connection: uvicorn on httptools, with the limits that both leave out.

A head has a length and a time. So has the rest of a body that nobody reads. Extensions of chunks, trailers, and what is
sent ahead of an answer have a length. llhttp, under httptools, refuses bare newlines, folded headers, two lengths, and
chunks beside a length.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn._types import ASGI3Application, ASGIReceiveEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0  # that the head of a request may take, from the connection's opening or its own first byte
REST_SECONDS = 300.0  # that the rest of a body may take which nobody waits for, as its request is answered already
HEAD_BYTES = 16 << 10
AHEAD = 1000  # requests that may be sent before the first of them is answered
AHEAD_BYTES = 64 << 10  # of their heads


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses what is too long, and hangs up on whoever does not reach the end of a request's head."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._in_head = self._in_body = False
        self._head = 0  # bytes of the head that has begun
        self._between = 0  # bytes since the last that were a body's, or a chunk's size
        self._ahead = 0  # bytes of heads of requests that wait
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, and give its first request time."""
        super().connection_made(transport)
        self._watch_time()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        in_head, in_body = self._in_head, self._in_body
        self._between += len(data)
        super().data_received(data)
        if self._in_head:
            # Where a head begins behind a body, nobody knows how much of these bytes is the body's.
            blank = -1 if in_head or in_body else data.rfind(b"\r\n\r\n")
            self._head += 0 if in_body else len(data) if blank < 0 else len(data) - blank - 4
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("Request head too long.")
        elif self._in_body and self._between > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Extension of a chunk, or trailers, too long.")
        self._watch_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request. Raises ValueError where the head is too long or can be read in two ways."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._ahead = self._ahead + size if self.pipeline else 0
        too_long = size > HEAD_BYTES or self._ahead > AHEAD_BYTES or len(self.pipeline) > AHEAD
        # llhttp skips the body of a request that asks for another protocol.
        if too_long or self.parser.should_upgrade() or self._is_ambiguous():
            raise ValueError("too long, or ambiguous")
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._between = 0

    def _is_ambiguous(self) -> bool:
        """Whether a proxy could see another target, host or end of this request than llhttp, which takes any."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or not self.url.startswith(b"/") or b"#" in self.url:
            return True
        hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version == "1.0":
            return hosts > 1 or bool(codings)
        return hosts != 1 or codings not in ([], [b"chunked"])

    def on_chunk_header(self) -> None:
        """The size of a chunk was read."""
        self._between = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["method"] != "HEAD":  # whose answers have nothing that a head could go out with
            cycle.transport = cast(asyncio.Transport, _HeadWithBody(self.transport, self.loop))
        cycle.receive = _Parts(cycle).receive  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_time()

    def send_400_response(self, msg: str) -> None:
        """End the connection: with 400, unless an answer is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _watch_time(self) -> None:
        """Time runs while a head is awaited that has begun or is the first, or a body that nobody reads."""
        answered = self.cycle is None or self.cycle.response_complete
        unused = self.cycle is None or self._in_head or self._in_body
        if not (answered and unused) or self.transport.is_closing():
            self._stop_waiting()
        elif self._overdue is None:
            seconds = REST_SECONDS if self._in_body else HEAD_SECONDS
            self._overdue = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


class _Parts:
    """What a request's body is collected in: the parts as they were read, which the server library would copy twice."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._receive = cycle.receive
        self._parts = [bytes(cycle.body)]  # what came while an earlier request was answered
        self._size = len(cycle.body)
        cycle.body = cast(bytearray, self)

    def __iadd__(self, part: bytes) -> _Parts:
        self._parts.append(part)
        self._size += len(part)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return body

    async def receive(self) -> ASGIReceiveEvent:
        """As the cycle's own, which takes the parts and would collect the next ones in a buffer of its own."""
        message = await self._receive()
        self._cycle.body = cast(bytearray, self)
        return message


class _HeadWithBody:
    """What one answer is written to: its head goes out together with the beginning of its body.

    That is one system call instead of two, and wakes the reader once. A head whose body is not there yet goes out in
    the event loop's next turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._direct = False

    def write(self, data: bytes) -> None:
        """Write, or keep what comes first for a moment."""
        if self._direct:
            self._transport.write(data)
        elif self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            head, self._head, self._direct = self._head, None, True
            self._transport.writelines((head, data))

    def is_closing(self) -> bool:
        """As of the transport."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the transport, once all is written."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Give up the connection."""
        self._transport.abort()

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head, self._direct = self._head, None, True
            if not self._transport.is_closing():
                self._transport.write(head)
