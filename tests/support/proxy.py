"""A proxy on loopback that gets in the way: lost answers, repeated requests, slow and cut bodies, nobody at home.

It knows as much HTTP as it needs to tell requests apart: each one gets a connection of its own in both directions, and
``trouble`` says what is done to it. The ideas are toxiproxy's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.support.loopback_server import LoopbackServer

Trouble = Literal[
    "none",
    "no-answer",  # carried out, and nobody is told
    "half-an-answer",
    "slow-answer",
    "half-a-request",
    "slow-request",
    "held-request",  # all but its last bytes are sent, and these when it is let go
    "too-large",  # answered 413, as by a proxy that limits bodies
    "refused",  # the connection is closed before anything is read upstream
    "twice",  # carried out twice, one after the other; the second answer comes
    "twice-at-once",  # the same, both under way together
    "late",  # carried out a while later
    "flipped-request",  # one bit of its body is another one
    "flipped-answer",
    "appended-answer",  # something is added to its body, and counted
    "false-encoding",  # its answer is said to be compressed
]
DAMAGES: tuple[Trouble, ...] = ("flipped-request", "flipped-answer", "appended-answer", "false-encoding")
LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
TOO_LARGE = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
PIECES = 8  # that a slow body comes in


@dataclass(frozen=True)
class ProxiedRequest:
    """A request as the proxy sees it; ``number`` counts from 0, ``size`` is its body's length."""

    number: int
    verb: str
    path: str
    size: int = 0


class Proxy(LoopbackServer):
    """``seen`` counts what was done."""

    def __init__(self, upstream: str, trouble: Callable[[ProxiedRequest], Trouble], pause: float = 0.02):
        self.trouble = trouble
        self.seen: Counter[str] = Counter()
        self._pause = pause
        self._number = 0
        self._gates: dict[str, asyncio.Event] = {}
        super().__init__(upstream)

    def let_go(self, path: str) -> None:
        """Send the rest of the request to ``path`` that is held, or will be."""
        self._loop.call_soon_threadsafe(lambda: self._gate(path).set())

    def _gate(self, path: str) -> asyncio.Event:
        return self._gates.setdefault(path, asyncio.Event())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # One of the two has gone away.
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        verb, path, _ = head.split(b" ", 2)
        length = LENGTH.search(head)
        asked = ProxiedRequest(self._number, verb.decode(), path.decode(), int(length[1]) if length else 0)
        self._number += 1
        trouble = self.trouble(asked)
        self.seen[trouble] += 1
        if trouble == "refused":
            return
        if trouble == "too-large":
            await self._write(writer, TOO_LARGE, slowly=False)
            return
        request = CONNECTION.sub(b"", head[:-4]) + b"\r\nConnection: close\r\n\r\n" + await _body(reader, head)
        if trouble == "flipped-request":
            request = _flipped(request)
        if trouble == "half-a-request":
            await self._send(
                request[: (len(head) + len(request)) // 2 if len(request) > len(head) + 50 else len(head) // 2]
            )
            return
        answer = await self._carried_out(request, trouble, asked.path)
        if trouble == "no-answer":
            return
        if trouble == "half-an-answer":
            answer = answer[: len(answer) // 2]
        answer = _damaged(answer, trouble)
        await self._write(writer, answer, slowly=trouble == "slow-answer")

    async def _carried_out(self, request: bytes, trouble: Trouble, path: str) -> bytes:
        if trouble == "twice-at-once":
            first, second = await asyncio.gather(self._send(request), self._send(request))
            return second or first
        if trouble == "twice":
            await self._send(request)
        if trouble == "late":
            await asyncio.sleep(10 * self._pause)
        gate = self._gate(path) if trouble == "held-request" else None
        return await self._send(request, slowly=trouble == "slow-request", gate=gate)

    async def _send(self, request: bytes, slowly: bool = False, gate: asyncio.Event | None = None) -> bytes:
        """The whole answer; the last bytes go out once the ``gate`` is open."""
        connected = await self._connected()
        if connected is None:
            return b""
        reader, writer = connected
        try:
            if gate is not None:
                await self._write(writer, request[:-10], slowly)
                await gate.wait()
                request = request[-10:]
            await self._write(writer, request, slowly)
            if gate is None and not slowly and not _is_whole(request):
                return b""
            return await reader.read(-1)
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, content: bytes, slowly: bool) -> None:
        size = max(1, -(-len(content) // PIECES)) if slowly else max(1, len(content))
        for start in range(0, len(content), size):
            writer.write(content[start : start + size])
            await writer.drain()
            if slowly:
                await asyncio.sleep(self._pause)


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = LENGTH.search(head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    body = b""
    if CHUNKED.search(head):
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.readuntil(b"\r\n")
    return body


def _flipped(message: bytes) -> bytes:
    head, end, body = message.partition(b"\r\n\r\n")
    at = len(body) // 2
    return head + end + (body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] if body else b"")


def _damaged(answer: bytes, trouble: Trouble) -> bytes:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not body:
        return answer
    if trouble == "flipped-answer":
        return _flipped(answer)
    if trouble == "appended-answer":
        script = b"<script>track()</script>"
        return LENGTH.sub(b"\r\nContent-Length: %d" % (len(body) + len(script)), head) + end + body + script
    return head + b"\r\nContent-Encoding: gzip" + end + body if trouble == "false-encoding" else answer


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    return bool(end) and (length is None or len(body) >= int(length[1]))
