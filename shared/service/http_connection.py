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
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0  # that the head of a request may take, from the connection's opening or its own first byte
REST_SECONDS = 300.0  # that the rest of a body may take which nobody waits for, as its request is answered already
HEAD_BYTES = 16 << 10
REFUSED = "Invalid HTTP request received."

# llhttp skips the body of a request that asks for another protocol: what follows would be taken for a request. Nobody
# gets another protocol here, and a server may ignore that it is asked (RFC 9110, section 7.8).
UPGRADE = re.compile(rb"\r\nupgrade:[\t -~]*(?=\r\n)", re.IGNORECASE)
# llhttp takes several spaces, other versions, whole addresses and fragments.
REQUEST_LINE = re.compile(rb"[A-Z-]+ /[!\"$-~]* HTTP/1\.[01]\r\n")
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?\r\n")


class StrictHttpProtocol(HttpToolsProtocol):
    """Refuses what is ambiguous or too long, reads no further than to the end of the request under way, and hangs up
    on whoever does not reach the end of a request's head.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._unread = b""
        self._in_head = False
        self._in_body = False
        self._body: _Counted | _Chunked = _Counted(0)
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
        blank = self._unread.find(b"\r\n\r\n")
        end = blank + 4 if blank >= 0 else len(self._unread)
        if self._unread[0] <= 0x20 or (blank < 0 and _has_bare_newline(self._unread)):
            raise ValueError("no request begins like this")
        if end > HEAD_BYTES:
            raise ValueError("the head is too long")
        if blank < 0:
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
        size = self._body.within(self._unread)
        data, self._unread = self._unread[:size], self._unread[size:]
        self.parser.feed_data(data)
        if self._in_body is self._body.ended:
            raise ValueError("the body does not end where it seems to")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is dropped."""
        if self._in_head:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Begin the request unless its head can be read in two ways. Raises ValueError."""
        version = self.parser.get_http_version()
        self._body = _body_of(self.headers, version)
        if version == "1.0":
            self.expect_100_continue = False
        if self.parser.should_upgrade():
            raise ValueError("CONNECT, or an Upgrade in odd characters")
        super().on_headers_complete()
        self._in_head, self._in_body = False, True

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["method"] != "HEAD":  # whose answers have nothing that a head could go out with
            cycle.transport = cast(asyncio.Transport, _HeadWithBody(self.transport, self.loop))
        cycle.receive = _Parts(cycle).receive  # type: ignore[method-assign]
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


class _Counted:
    """Where a body ends whose length is told."""

    def __init__(self, length: int):
        self._left = length

    @property
    def ended(self) -> bool:
        return self._left == 0

    def within(self, data: bytes) -> int:
        """How many of the next bytes are still the body's."""
        size = min(self._left, len(data))
        self._left -= size
        return size


class _Chunked:
    """The same of chunks: whether they are right is llhttp's to say, but it would read on behind the last."""

    def __init__(self) -> None:
        self.ended = False
        self._content = 0  # bytes left of a chunk and its line's end
        self._line = b""
        self._trailers: int | None = None  # bytes of them so far, once the last chunk was there

    def within(self, data: bytes) -> int:
        """As of a counted one. Raises ValueError where a line is none, or too long."""
        at = 0
        while at < len(data) and not self.ended:
            if self._content:
                step = min(self._content, len(data) - at)
                self._content, at = self._content - step, at + step
                continue
            end = data.find(b"\n", at) + 1 or len(data)
            self._line, at = self._line + data[at:end], end
            if len(self._line) + (self._trailers or 0) > HEAD_BYTES:
                raise ValueError("chunk extensions or trailers are too long")
            if self._line.endswith(b"\n"):
                self._take(self._line)
                self._line = b""
        return at

    def _take(self, line: bytes) -> None:
        if self._trailers is not None:
            self._trailers += len(line)
            self.ended = line == b"\r\n"
            return
        match = CHUNK_LINE.fullmatch(line)
        if match is None:
            raise ValueError("no size of a chunk")
        size = int(match[1], 16)
        if size:
            self._content = size + len(b"\r\n")
        else:
            self._trailers = 0


def _body_of(headers: list[tuple[bytes, bytes]], version: str) -> _Counted | _Chunked:
    """How the body ends. Raises ValueError where two readers could see two bodies."""
    of_host = sum(name == b"host" for name, _ in headers)
    if of_host > 1 or (version == "1.1" and of_host == 0):
        raise ValueError("one Host header, or none in HTTP/1.0")
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        if len(lengths) > 1:
            raise ValueError("two lengths")
        return _Counted(int(lengths[0]) if lengths else 0)
    if lengths or version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]:
        raise ValueError("chunked, and nothing else")
    return _Chunked()


class _Parts:
    """What a request's body is collected in: the parts as they were read, which the server library would copy twice."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._receive = cycle.receive
        self._parts: list[bytes] = []
        self._size = 0
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
