"""Whether the coordinator that a request went to is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from promptfed.shared.service.addresses import GONE_SECONDS, QUIET_SECONDS

SLOWEST = 128 << 10  # bytes per second that a line is given for what is sent, before its silence counts


class WatchedLine:
    """Ends a request after `GONE_SECONDS` without a byte of its answer and without an answer to ``/readyz``.

    ``/readyz`` is asked after `QUIET_SECONDS` without a byte, so that a coordinator that is only slow is waited for.
    """

    def __init__(self, http: httpx.AsyncClient):
        self._http = http
        self._heard = 0.0

    def heard(self) -> None:
        """Bytes of an answer have come."""
        self._heard = time.monotonic()

    @asynccontextmanager
    async def watched(self, address: str) -> AsyncIterator[None]:
        """A block with one request. Raises httpx.ReadTimeout where the coordinator is gone."""
        self.heard()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                watching = asyncio.create_task(self._watch(address, limit))
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            raise httpx.ReadTimeout(f"nothing heard for {GONE_SECONDS:g} s") from None

    async def _watch(self, address: str, limit: asyncio.Timeout) -> None:
        """Let ``limit`` pass once the coordinator is gone."""
        while True:
            quiet = time.monotonic() - self._heard
            if quiet < QUIET_SECONDS:
                await asyncio.sleep(QUIET_SECONDS - quiet)
            elif await self._is_there(address):
                self.heard()
            else:
                limit.reschedule(asyncio.get_running_loop().time())
                return

    async def _is_there(self, address: str) -> bool:
        try:
            async with asyncio.timeout(GONE_SECONDS - QUIET_SECONDS):
                return (await self._http.get(f"{address}/readyz")).is_success
        except (httpx.TransportError, TimeoutError):
            return False

    def noted(self, content: bytes | AsyncIterator[bytes] | None) -> bytes | AsyncIterator[bytes] | None:
        """What is sent; while it is under way, silence does not count."""
        if isinstance(content, bytes):
            self._heard += len(content) / SLOWEST
        return content if content is None or isinstance(content, bytes) else self._parts(content)

    async def _parts(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in content:
            yield part
            self._heard = time.monotonic() + len(part) / SLOWEST
