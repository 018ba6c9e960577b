"""Bodies of tensors: streamed to a temporary file, at most N at once, hashed on the way.

More wait their turn for a while, unread: refused at once, clients would send whole bodies in vain and stay away for
seconds while there is room. What waits is bounded in bytes, so memory does not grow with the number of clients. Of the
places one client has a share: with slow bodies it would keep all others out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fastapi import Request
from starlette.requests import ClientDisconnect

from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import DigestMismatch, DigestMissing, IncompleteBody, TooManyUploads, UploadTimeout
from promptfed.coordinator.store.upload import Upload

CHUNK = 1 << 20
DRAINED = 8 << 20  # how much more than its limit a body may have before we stop listening to it
RETRY_AFTER = "2"
WAITING_BYTES = 64 << 20
SHARE = 4  # a client has at most one place in so many, but always one
OF_ONE_CLIENT = 8  # bodies that may be under way or wait
HELD_BYTES = 320 << 10  # of one body, before the server stops reading it: 64 KB and what was under way
_SHA256 = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):")


class _ClientPlaces:
    """The places that one client may take; ``bodies`` are under way or wait."""

    def __init__(self, most: int):
        self.places = asyncio.Semaphore(most)
        self.bodies = 0


class Uploads:
    """The uploads under way."""

    def __init__(self, registry: Registry, most: int, timeout: float, wait_seconds: float):
        self._registry = registry
        self._most = most
        self._timeout = timeout
        self._wait_seconds = wait_seconds
        self._places = asyncio.Semaphore(most)
        self._by_client: dict[object, _ClientPlaces] = {}
        self._running = 0
        self._waiting_bytes = 0

    @asynccontextmanager
    async def receive(self, request: Request, limit: int) -> AsyncIterator[Upload]:
        """The request's body on disk, removed at the end of the block unless somebody took it.

        Raises:
            TooManyUploads, UploadTimeout, IncompleteBody: it could not be received.
        """
        async with self._place(getattr(request.state, "client", None), _held(request)):
            self._running += 1
            self._registry.metrics.uploads.set(self._running)
            path = self._registry.blobs.temporary()
            try:
                yield await self._receive(request, path, limit)
            finally:
                self._running -= 1
                self._registry.metrics.uploads.set(self._running)
                if _is_there(path):
                    await asyncio.to_thread(path.unlink, missing_ok=True)

    @asynccontextmanager
    async def _place(self, client: object | None, held: int) -> AsyncIterator[None]:
        """A place for the length of the block, waited for; ``client`` is None where an operator sends."""
        most = self._most if client is None else max(1, self._most // SHARE)
        own = self._by_client.get(client) or _ClientPlaces(most)
        if self._waiting_bytes + held > WAITING_BYTES or (client is not None and own.bodies >= OF_ONE_CLIENT):
            raise self._too_many()
        self._by_client[client] = own
        own.bodies += 1
        self._waiting_bytes += held
        try:
            async with AsyncExitStack() as taken:
                try:
                    async with asyncio.timeout(self._wait_seconds):
                        await taken.enter_async_context(own.places)
                        await taken.enter_async_context(self._places)
                except TimeoutError:
                    raise self._too_many() from None
                finally:
                    self._waiting_bytes -= held
                yield
        finally:
            own.bodies -= 1
            if own.bodies == 0:
                del self._by_client[client]

    def _too_many(self) -> TooManyUploads:
        text = f"too many uploads are under way: try again in {RETRY_AFTER} s"
        return TooManyUploads(text, headers={"Retry-After": RETRY_AFTER})

    async def _receive(self, request: Request, path: Path, limit: int) -> Upload:
        try:
            async with asyncio.timeout(self._timeout):
                return await _stream(request, path, limit)
        except TimeoutError:
            raise UploadTimeout(f"the body did not arrive within {self._timeout:g} s") from None
        except ClientDisconnect:
            raise IncompleteBody("the connection ended before the body did") from None


def _held(request: Request) -> int:
    """How much of the body may lie in memory while it waits."""
    length = _announced_length(request)
    return HELD_BYTES if length is None else min(length, HELD_BYTES)


def _announced_length(request: Request) -> int | None:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def _is_there(path: Path) -> bool:
    return path.exists()


async def _stream(request: Request, path: Path, limit: int) -> Upload:
    digest, size, waiting = hashlib.sha256(), 0, bytearray()
    announced = _announced_length(request)
    if announced is not None and announced > limit + DRAINED:
        return Upload(path, announced, "", too_large=True)

    def put(content: bytes) -> None:
        digest.update(content)
        with path.open("ab") as file:
            file.write(content)

    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            # Read on for a while, so that a client that is still sending finds our answer and not a closed door.
            if size > limit + DRAINED:
                break
            continue
        waiting += chunk
        if len(waiting) >= CHUNK:
            await asyncio.to_thread(put, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(put, bytes(waiting))
    return Upload(path, size, "sha256:" + digest.hexdigest(), too_large=size > limit)


def announced_digest(header: str | None) -> str:
    """The SHA-256 of a Content-Digest header (RFC 9530), as ``sha256:<hex>``. Raises DigestMissing."""
    match = _SHA256.search(header or "")
    try:
        raw = base64.b64decode(match.group(1), validate=True) if match else b""
    except binascii.Error:
        raw = b""
    if len(raw) != hashlib.sha256().digest_size:
        raise DigestMissing("send the body's SHA-256 as `Content-Digest: sha-256=:<base64>:`")
    return "sha256:" + raw.hex()


def expect_digest(upload: Upload, announced: str) -> None:
    """Refuse a body that is not what was announced. One that was cut off at the limit cannot be compared."""
    if not upload.too_large and upload.sha256 != announced:
        raise DigestMismatch(f"the body has digest {upload.sha256}; {announced} was announced: send it again")
