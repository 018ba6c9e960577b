"""One HTTP connection without a socket: our side (``StrictHttpProtocol``), and h11's reading of the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from promptfed.shared.service.http_connection import StrictHttpProtocol

TURNS = 1000  # of the event loop, in which all that can be answered is


@dataclass
class Request:
    """A request as the application sees it."""

    method: str
    target: str
    version: str
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


@dataclass
class Conversation:
    """What has come out of some bytes: requests whose end was reached, what was written, and whether it has ended."""

    requests: list[Request] = field(default_factory=list)
    written: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    ended: bool = False
    aborted: bool = False

    @property
    def statuses(self) -> list[int]:
        """Of the answers, in order."""
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]

    @property
    def refused(self) -> bool:
        """Whether the last word was that this is no HTTP."""
        return self.statuses[-1:] == [400] and self.ended


class _Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.said = Conversation()
        self.reading = True

    def write(self, data: Any) -> None:
        if not self.said.ended:
            self.said.written += bytes(data)
            self.said.writes.append(bytes(data))

    def close(self) -> None:
        self.said.ended = True

    def abort(self) -> None:
        self.said.ended = self.said.aborted = True

    def is_closing(self) -> bool:
        return self.said.ended

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def converse(*pieces: bytes) -> Conversation:
    """What our side makes of ``pieces``, each a read of its own, with an application that reads a body and answers."""
    return asyncio.run(_converse(pieces))


async def _converse(pieces: Sequence[bytes]) -> Conversation:
    wire = _Wire()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more and not (scope["path"] == "/early" and body):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        query = scope["query_string"].decode()
        target = scope["raw_path"].decode() + (f"?{query}" if query else "")
        wire.said.requests.append(Request(scope["method"], target, scope["http_version"], list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/later":
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"good"})

    config = uvicorn.Config(answer, http=StrictHttpProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    connection = StrictHttpProtocol(config, ServerState(), {}, _loop=asyncio.get_running_loop())
    connection.connection_made(wire)
    for piece in pieces:
        for _ in range(TURNS):
            if wire.reading or wire.said.ended:
                break
            await asyncio.sleep(0)
        if wire.said.ended:
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    if connection.tasks and b"/later" in b"".join(pieces):
        await asyncio.wait(connection.tasks)
    for _ in range(TURNS):
        if not connection.tasks:
            break
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.gather(*connection.tasks)
    return wire.said


def by_h11(data: bytes) -> Conversation:
    """What h11 makes of the same bytes as a server that answers everything."""
    connection, found = h11.Connection(h11.SERVER), Conversation()
    connection.receive_data(data)
    request = None
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                names = list(event.headers)
                request = Request(event.method.decode(), event.target.decode(), event.http_version.decode(), names, b"")
            elif isinstance(event, h11.Data):
                assert request is not None
                request.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                found.requests.append(request)
                for answer in (h11.Response(status_code=404, headers=[("content-length", "0")]), h11.EndOfMessage()):
                    connection.send(answer)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            else:
                break
    except h11.RemoteProtocolError:
        found.ended, found.written = True, b"HTTP/1.1 400 "
    return found
