"""A server's side of one HTTP/1.1 connection: uvicorn on httptools, which is fed one message at a time.

llhttp, under httptools, is fast since it looks at little: it takes heads of any length and trailers without end, any
number of `Host` headers, and everything that a caller sends ahead of the answers. Here a head is handed over once it
is whole and short enough, what follows a request waits unparsed until that request is answered, and what RFC 9112
leaves to the server is refused before anything of it reaches the application.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import httptools
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0  # that the head of a request may take, from the connection's opening or its own first byte
REST_SECONDS = 300.0  # that the rest of a body may take which nobody waits for, as its request is answered already
HEAD_BYTES = 16 << 10
REFUSED = "Invalid HTTP request received."

# llhttp skips the body of a request that asks for another protocol: what follows would be taken for a request. Nobody
# gets another protocol here, and a server may ignore that it is asked (RFC 9110, section 7.8).
UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*(?=\r\n)", re.IGNORECASE)
# llhttp takes several spaces, other versions, whole addresses and fragments.
REQUEST_LINE = re.compile(rb"[A-Z-]+ /[!\"$-~]* HTTP/1\.[01]\r\n")


class Connection(HttpToolsProtocol):
    """Refuses what is ambiguous or too long, reads no further than to the end of the request under way, and hangs up
    on whoever does not reach the end of a request's head.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._unread = b""
        self._in_head = False
        self._in_body = False
        self._left: int | None = None  # bytes of the body; None: it is chunked
        self._besides = 0  # bytes of a chunked body since the last that were content: extensions and trailers
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, and give its first request time."""
        super().connection_made(transport)
        self._watch_time()

    def data_received(self, data: bytes) -> None:
        """Read on, as far as what was asked before is answered."""
        self._unset_keepalive_if_required()
        self._unread = self._unread + data if self._unread else data
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = b""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on with what came behind the answered request."""
        super().on_response_complete()
        self._read_on()

    def _read_on(self) -> None:
        try:
            while self._unread and not self.transport.is_closing():
                if self._in_body:
                    self._feed_body()
                elif not self._answered():
                    self.flow.pause_reading()
                    break
                elif not self._feed_head():
                    break
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError):
            self._refuse()
        self._watch_time()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _feed_head(self) -> bool:
        """Whether there was a whole head. Raises where it is refused."""
        found = self._unread.find(b"\r\n\r\n")
        end = found + 4 if found >= 0 else len(self._unread)
        if self._unread[0] <= 0x20 or (found < 0 and _has_bare_newline(self._unread)):
            raise ValueError("no request begins like this")
        if end > HEAD_BYTES:
            raise ValueError("the head is too long")
        if found < 0:
            return False
        head, self._unread = self._unread[:end], self._unread[end:]
        if not REQUEST_LINE.match(head):
            raise ValueError("no request line")
        self._in_head = True
        self._unset_keepalive_if_required()
        self.parser.feed_data(UPGRADE.sub(b"", head))
        if self._in_head:
            raise ValueError("the head does not end where it seems to")
        return True

    def _feed_body(self) -> None:
        if self._left is None:
            data, self._unread = self._unread, b""
            self._besides += len(data)
        else:
            data, self._unread = self._unread[: self._left], self._unread[self._left :]
            self._left -= len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._in_body:
                raise
            # Whole, but something follows a chunked body in what was read with its end, and is lost: without
            # a connection whoever sent it knows that it was not answered.
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        if self._in_body and self._besides > HEAD_BYTES:
            raise ValueError("chunk extensions or trailers are too long")

    def on_message_begin(self) -> None:
        """Of a head that was handed over, and not of what follows a chunked body."""
        if not self._in_head:
            raise ValueError("a request behind a chunked body")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is dropped."""
        if self._in_head:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Begin the request unless its head can be read in two ways. Raises ValueError."""
        version = self.parser.get_http_version()
        self._left = _length(self.headers, version)
        if version == "1.0":
            self.expect_100_continue = False
        if self.parser.should_upgrade():
            raise ValueError("CONNECT is for proxies")
        super().on_headers_complete()
        self._in_head, self._in_body, self._besides = False, True, 0

    def on_body(self, body: bytes) -> None:
        self._besides = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _UntilTheEnd(cycle).send  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    def _refuse(self) -> None:
        """End the connection: with 400, unless an answer has begun."""
        self.logger.warning(REFUSED)
        self._unread = b""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        elif self._in_body:
            self.transport.close()
            return
        self.send_400_response(REFUSED)

    def _watch_time(self) -> None:
        """Time runs while a head is awaited that has begun or is the first, or a body that nobody reads."""
        unused = self.cycle is None or bool(self._unread) or self._in_body
        if not (self._answered() and unused) or self.transport.is_closing():
            self._stop_waiting()
        elif self._overdue is None:
            seconds = REST_SECONDS if self._in_body else HEAD_SECONDS
            self._overdue = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


def _has_bare_newline(data: bytes) -> bool:
    return data.count(b"\n") != data.count(b"\r\n")


def _length(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Bytes of the body, None where it is chunked. Raises ValueError where two readers could see two bodies."""
    of_host = sum(name == b"host" for name, _ in headers)
    if of_host > 1 or (version == "1.1" and of_host == 0):
        raise ValueError("one Host header, or none in HTTP/1.0")
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        if len(lengths) > 1:
            raise ValueError("two lengths")
        return int(lengths[0]) if lengths else 0
    if lengths or version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]:
        raise ValueError("chunked, and nothing else")
    return None


class _UntilTheEnd:
    """An answer to HTTP/1.0, which knows no chunks: without a length it ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._send = cycle.send
        self._unbounded = False

    async def send(self, message: ASGISendEvent) -> None:
        """As the cycle's own."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", [])]
            self._unbounded = b"content-length" not in names
            if self._unbounded:
                cycle.chunked_encoding = False
        elif self._unbounded:
            body = cast(dict[str, Any], message).get("body", b"")
            cycle.expected_content_length = len(body)
        await self._send(message)
