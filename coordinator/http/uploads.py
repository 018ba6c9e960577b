"""Tensors as they arrive, within limits of size, number and time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import DigestMismatch, DigestMissing, IncompleteBody, TooManyUploads, UploadTimeout
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.upload import Upload
from promptfed.shared.service import digests
from promptfed.shared.tensors import BYTES_PER_SECOND

CHUNK = 1 << 20
DRAINED = 8 << 20  # how much more than its limit a body may have before we stop listening to it
WAITING_BYTES = 64 << 20
SHARE = 4  # a client has at most one place in so many, but always one
OF_ONE_CLIENT = 8  # bodies that may be under way or wait
SMALL = 256 << 10  # bytes of an announced body that takes no place, and has to be there within seconds
SMALL_SECONDS = 15.0
LEAST_RATE = 4 << 10  # bytes a second of a larger one, by which it may be behind for so many seconds:
BEHIND_SECONDS = 20.0
HELD_BYTES = 320 << 10  # of one body, before the server stops reading it: 64 KB and what was under way


@dataclass(frozen=True)
class Incoming:
    """A request's body that is to come: from where, of what ``length`` if that was announced, and from which client
    (None: an operator).
    """

    receive: Receive
    length: int | None
    client: object | None = None

    @classmethod
    def of(cls, request: Request) -> Incoming:
        """The body of a request, before anything of it is read."""
        length = announced_length(request.headers.get("content-length"))
        return cls(request.receive, length, getattr(request.state, "client", None))

    @property
    def is_small(self) -> bool:
        """Whether it is known to be small."""
        return self.length is not None and self.length <= SMALL

    @property
    def held(self) -> int:
        """The maximum number of bytes in memory while the body waits."""
        return HELD_BYTES if self.length is None else min(self.length, HELD_BYTES)

    async def parts(self) -> AsyncIterator[bytes]:
        """The parts as they arrive. Raises ClientDisconnect."""
        more = True
        while more:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            more = message.get("more_body", False)
            if part := message.get("body", b""):
                yield part


class ClientPlaces:
    """The places of one client; ``bodies``: how many of its bodies are being received or wait."""

    def __init__(self, most: int):
        self.semaphore = asyncio.Semaphore(most)
        self.bodies = 0


class Uploads:
    """The current uploads, and those that wait."""

    def __init__(self, registry: Registry, most: int, timeout: float, wait_seconds: float):
        self._registry = registry
        self._most = most
        self._timeout = timeout  # seconds for a body, or longer where it is long
        self._wait_seconds = wait_seconds
        self._places = asyncio.Semaphore(most)
        self._by_client: dict[object, ClientPlaces] = {}
        self._running = 0
        self._waiting_bytes = 0

    @asynccontextmanager
    async def receive(self, body: Incoming, limit: int, *, compressed: bool = False) -> AsyncIterator[Upload]:
        """Receive a body, in memory or in a file. The file is removed at the end of the block unless it was moved.

        A small ``compressed`` body may become a large update in the file. A body in memory gives its place to the next
        one at once; it counts as waiting until the end of the block.

        Raises:
            TooManyUploads, UploadTimeout, IncompleteBody: it could not be received.
        """
        places = self.enter(body)
        path, in_memory, on_disk = self._registry.blobs.temporary(), 0, True
        try:
            async with self._placed(places, body):
                upload = await self._receive(body, path, limit)
                on_disk = upload.content is None
                if on_disk:
                    yield upload
            if not on_disk:
                in_memory = upload.size
                self._waiting_bytes += in_memory
                yield upload
        finally:
            self._waiting_bytes -= in_memory
            self.leave(body, places)
            if on_disk or compressed:
                await asyncio.to_thread(path.unlink, missing_ok=True)

    @asynccontextmanager
    async def _placed(self, places: ClientPlaces, body: Incoming) -> AsyncIterator[None]:
        """A block in which a body has its places, if it takes any."""
        if body.is_small:
            self._waiting_bytes += body.held
            try:
                yield
            finally:
                self._waiting_bytes -= body.held
            return
        await self._take_places(places, body.held)
        try:
            yield
        finally:
            self._give_places(places)

    def leave(self, body: Incoming, places: ClientPlaces) -> None:
        """The body is not counted any more."""
        places.bodies -= 1
        if places.bodies == 0:
            del self._by_client[body.client]

    def enter(self, body: Incoming) -> ClientPlaces:
        """Count the body; returns the places of its client. Raises TooManyUploads."""
        client, held = body.client, body.held
        most = self._most if client is None else max(1, self._most // SHARE)
        places = self._by_client.get(client) or ClientPlaces(most)
        if self._waiting_bytes + held > WAITING_BYTES or (client is not None and places.bodies >= OF_ONE_CLIENT):
            raise self._too_many()
        self._by_client[client] = places
        places.bodies += 1
        return places

    async def _take_places(self, places: ClientPlaces, held: int) -> None:
        """Wait for one of the client's places, and for one of all places."""
        self._waiting_bytes += held
        try:
            if places.semaphore.locked() or self._places.locked():
                async with asyncio.timeout(self._wait_seconds):
                    await self._take(places)
            else:
                await self._take(places)
        except TimeoutError:
            raise self._too_many() from None
        finally:
            self._waiting_bytes -= held
        self._running += 1
        self._registry.metrics.uploads.set(self._running)

    async def _take(self, places: ClientPlaces) -> None:
        await places.semaphore.acquire()
        try:
            await self._places.acquire()
        except BaseException:
            places.semaphore.release()
            raise

    def _give_places(self, places: ClientPlaces) -> None:
        self._places.release()
        places.semaphore.release()
        self._running -= 1
        self._registry.metrics.uploads.set(self._running)

    def _too_many(self) -> TooManyUploads:
        return TooManyUploads(f"too many uploads are under way: try again in {TooManyUploads.retry_after} s")

    async def _receive(self, body: Incoming, path: Path, limit: int) -> Upload:
        # Of one that is small, or not announced, nobody waits longer.
        seconds = max(self._timeout, min(body.length or 0, limit) / BYTES_PER_SECOND)
        if body.is_small:
            seconds = min(seconds, SMALL_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                return await self._stream(body, path, limit)
        except TimeoutError:
            raise UploadTimeout(f"the body did not arrive within {seconds:g} s") from None
        except _TooSlow:
            text = f"less than {LEAST_RATE:,} bytes a second of the body have arrived"
            raise UploadTimeout(f"{text} for {BEHIND_SECONDS:g} s") from None
        except ClientDisconnect:
            raise IncompleteBody("the connection ended before the body did") from None

    async def _stream(self, body: Incoming, path: Path, limit: int) -> Upload:
        file, size = _File(path), 0
        if body.length is not None and body.length > limit + DRAINED:
            return Upload(path, body.length, "", too_large=True)
        parts = body.parts()
        # A small one has to be whole before it could be behind.
        async for part in parts if body.is_small else _in_time(parts):
            size += len(part)
            if size > limit:
                # Read on for a while, so that a client that is still sending finds our answer and not a closed door.
                if size > limit + DRAINED:
                    break
                continue
            file.add(part)
            if file.bytes_waiting >= CHUNK:
                await asyncio.to_thread(file.write)
        if not file.written and size <= limit and self._registry.blobs.is_small(size):
            content = b"".join(file.waiting)
            return Upload(path, size, digest_of(content), content=content)
        await asyncio.to_thread(file.write)
        return Upload(path, size, "sha256:" + file.digest.hexdigest(), too_large=size > limit)


class _TooSlow(Exception):
    """A body arrives too slowly."""


async def _in_time(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts, as long as they come at `LEAST_RATE`. Raises _TooSlow."""
    now = asyncio.get_running_loop().time
    until = now() + BEHIND_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await anext(parts)
        except TimeoutError:
            raise _TooSlow from None
        except StopAsyncIteration:
            return
        until = min(now() + BEHIND_SECONDS, until + len(part) / LEAST_RATE)
        yield part


class _File:
    """A body that is written to a file. Its parts are not joined: copying costs as much as hashing."""

    def __init__(self, path: Path):
        self.digest = hashlib.sha256()
        self.waiting: list[bytes] = []
        self.bytes_waiting = 0
        self.written = False
        self._path = path

    def add(self, part: bytes) -> None:
        """Keep a part until it is written."""
        self.waiting.append(part)
        self.bytes_waiting += len(part)

    def write(self) -> None:
        """Write and hash what waits."""
        with self._path.open("ab", buffering=0) as file:
            for part in self.waiting:
                self.digest.update(part)
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        self.waiting.clear()
        self.bytes_waiting = 0
        self.written = True


def announced_length(header: str | None) -> int | None:
    """The number in a Content-Length header; None if there is none."""
    return int(header) if header is not None and header.isdecimal() else None


def announced_digest(header: str | None) -> str:
    """The SHA-256 of a Content-Digest header (RFC 9530), as ``sha256:<hex>``. Raises DigestMissing."""
    raw = digests.sha256_in(header)
    if raw is None:
        raise DigestMissing("send the body's SHA-256 as `Content-Digest: sha-256=:<base64>:`")
    return "sha256:" + raw.hex()


def expect_digest(upload: Upload, announced: str) -> None:
    """Refuse a body with another digest than announced. A body over the limit is not compared."""
    if not upload.too_large:
        expect_same(upload.sha256, announced)


def expect_same(actual: str, announced: str) -> None:
    if actual != announced:
        raise DigestMismatch(f"the body has digest {actual}; {announced} was announced: send it again")
