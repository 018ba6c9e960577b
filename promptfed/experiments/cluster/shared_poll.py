"""One long request for all clients of a process instead of one long poll for each client.

The federation's event stream names the clients that each phase asks. A client's poll waits here, without a connection,
until the stream names the client; then it goes to the coordinator, which alone hands out tasks. So does the question of
a client that carries out a task, until the stream says that the task is settled. Clients do not notice: this is the
transport of their HTTP client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from promptfed.shared.messages import ENDED

log = logging.getLogger("promptfed.crew")

SOCKETS = 16  # for the requests of all clients, without the stream
SHORT_POLL = 2  # seconds that a poll waits at the coordinator for an announced task
LOOK_AGAIN_SECONDS = 300.0  # after which a client polls even if no event has named it
RECONNECT_SECONDS = 0.5, 10.0  # first and longest pause before the stream is opened again
SILENCE_SECONDS = 60.0  # without data on the stream; the coordinator sends a ping every 15 s
_POLL = re.compile(r"/v1/federations/[^/]+/task")


@dataclass(frozen=True)
class ServerEvent:
    """One event of the stream: its number, its kind and its content."""

    id: str
    kind: str
    data: Mapping[str, Any]


class Announcements:
    """Which clients of ``names`` have a task at the coordinator, according to the events."""

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._asked: set[str] = set()
        self._unsure = set(self._names)  # who is to look, whatever the events say
        self._waiting: dict[str, asyncio.Event] = {}
        self._working: dict[str, asyncio.Event] = {}
        self.ended = False

    def tell(self, event: ServerEvent) -> None:
        """Update the state by an event."""
        data = event.data
        if event.kind in ("phase-opened", "clients-asked"):
            self._call(data["asked"])
        elif event.kind == "task-settled":
            self._asked.discard(data["client"])
            self._tell_working({data["client"]})
        elif event.kind == "phase-completed":
            self._asked.clear()
        elif event.kind in ("client-withdrawn", "client-reset"):
            self.look({data["client"]})
        elif event.kind == "federation-state":
            self.ended = data["state"] in ENDED
            if self.ended:
                self.look(self._names)
                self._tell_working(self._names)

    def look(self, names: Iterable[str] | None = None) -> None:
        """Let these clients (None: all) poll once."""
        chosen = self._names if names is None else self._names & set(names)
        self._unsure |= chosen
        self._wake(chosen)

    async def wait(self, name: str, seconds: float) -> int | None:
        """The seconds for the client's poll at the coordinator; None if no event names it within ``seconds``."""
        if not self._due(name):
            named = self._waiting[name] = asyncio.Event()  # a client asks one thing at a time
            await wait(named, seconds)
        if not self._due(name):
            return None
        self._unsure.discard(name)
        return SHORT_POLL if name in self._asked and not self.ended else 0

    def served(self, name: str) -> None:
        """The client has got its task."""
        self._asked.discard(name)

    def settled(self, name: str) -> asyncio.Event:
        """Set as soon as an event settles the task that the client carries out."""
        over = self._working[name] = asyncio.Event()
        return over

    def _tell_working(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._working:
                self._working.pop(name).set()

    def _call(self, names: Iterable[str]) -> None:
        chosen = self._names & set(names)
        self._asked |= chosen
        self._wake(chosen)

    def _due(self, name: str) -> bool:
        return self.ended or name in self._asked or name in self._unsure

    def _wake(self, names: Iterable[str]) -> None:
        for name in names:
            event = self._waiting.pop(name, None)
            if event is not None:
                event.set()


async def wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set within ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class SharedPoll(httpx.AsyncBaseTransport):
    """Sends clients' requests through ``inner``, at most ``SOCKETS`` at once, and polls only for asked clients.

    ``names`` are the clients' names by their tokens.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, asked: Announcements, names: Mapping[str, str]):
        self._inner, self._asked = inner, asked
        self._names = {f"Bearer {token}": name for token, name in names.items()}
        self._turns = asyncio.Semaphore(SOCKETS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The coordinator's answer, or 204 to a poll of a client without a task."""
        name = self._names.get(request.headers.get("authorization", ""))
        seconds = _seconds(request)
        if name is not None and "carrying" in request.url.params:
            settled = self._asked.settled(name)
            answer = await self._sent(_again(request, 0))
            is_over = answer.status_code == 204 and await wait(settled, seconds)
            return await self._sent(_again(request, 0)) if is_over else answer
        if name is not None and seconds > 0:
            there = await self._asked.wait(name, seconds)
            if there is None:
                return httpx.Response(204, request=request)
            request = _again(request, there)
        answer = await self._sent(request)
        if name is not None and seconds > 0 and answer.status_code == 200:
            self._asked.served(name)
        return answer

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        async with self._turns:
            answer = await self._inner.handle_async_request(request)
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            try:
                body = b"".join([part async for part in answer.stream])  # the next turn has the connection
            finally:
                await answer.aclose()
        return httpx.Response(answer.status_code, headers=answer.headers, content=body, request=request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def _seconds(request: httpx.Request) -> float:
    """The seconds that a poll may wait; 0 for other requests."""
    if request.method != "GET" or not _POLL.fullmatch(request.url.path):
        return 0.0
    return float(request.url.params.get("wait", "0"))


def _again(request: httpx.Request, seconds: int) -> httpx.Request:
    url = request.url.copy_set_param("wait", str(seconds))
    headers = [(key, value) for key, value in request.headers.raw if key.lower() != b"host"]
    return httpx.Request(request.method, url, headers=headers, extensions=request.extensions)


@asynccontextmanager
async def following(http: httpx.AsyncClient, url: str, token: str, asked: Announcements) -> AsyncIterator[None]:
    """A block during which ``asked`` receives the events at ``url``; ``token`` is an operator's."""
    tasks = {asyncio.create_task(_follow(http, url, token, asked)), asyncio.create_task(_look_again(asked))}
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _look_again(asked: Announcements) -> None:
    while True:
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        asked.look()


async def _follow(http: httpx.AsyncClient, url: str, token: str, asked: Announcements) -> None:
    last, pause = "", RECONNECT_SECONDS[0]
    while not asked.ended:
        headers = {"Authorization": f"Bearer {token}", **({"Last-Event-ID": last} if last else {})}
        timeout = httpx.Timeout(10.0, read=SILENCE_SECONDS)
        try:
            async with http.stream("GET", url, headers=headers, timeout=timeout) as answer:
                if answer.is_success:
                    async for event in events_of(answer.aiter_lines()):
                        last, pause = event.id, RECONNECT_SECONDS[0]
                        asked.tell(event)
        except httpx.TransportError as error:
            log.warning("the events of the federation have broken off (%s)", error or type(error).__name__)
        if not asked.ended:
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_SECONDS[1])
            asked.look()  # a coordinator that was started again may ask again for what its disk has lost


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[ServerEvent]:
    """The events of a stream of server-sent events, without comments and events without a number."""
    id, kind, data = "", "", ""
    async for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data += value
        elif not line:
            if id and kind and data:
                yield ServerEvent(id, kind, json.loads(data))
            kind, data = "", ""
