"""A line that is cut: bytes are passed on both ways and counted, and connections end in the middle by plan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.loopback_server import LoopbackServer
from tests.support.waiting import PATIENCE

PIECE = 16 << 10


@dataclass
class Cut:
    """A connection that carries so many bytes up, or down, ends there."""

    up: int | None = None
    down: int | None = None


class Relay(LoopbackServer):
    """Each cut is for the next connection that reaches it; ``up`` and ``down`` are the bytes of all connections."""

    def __init__(self, upstream: str, cuts: Sequence[Cut] = ()):
        self.cuts = list(cuts)
        self.up = self.down = 0
        super().__init__(upstream)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = await self._connected()
        if connected is None:
            writer.close()
            return
        above, below = connected
        ways = [
            asyncio.create_task(self._pass(reader, below, "up")),
            asyncio.create_task(self._pass(above, writer, "down")),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if ways[0].done():
                await self._arrive(ways[1], above, below)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, below):
                end.close()

    async def _arrive(self, back: asyncio.Task[None], above: asyncio.StreamReader, below: asyncio.StreamWriter) -> None:
        """What was passed up reaches the other end, and its end is seen there, before whoever sent it learns of it."""
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        with contextlib.suppress(OSError, TimeoutError):
            below.write_eof()
            async with asyncio.timeout(PATIENCE):
                while await above.read(PIECE):
                    pass

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        """Until the end of the connection, or a cut."""
        passed = 0
        try:
            while part := await reader.read(PIECE):
                setattr(self, way, getattr(self, way) + len(part))
                passed += len(part)
                writer.write(part)
                await writer.drain()
                most = getattr(self.cuts[0], way) if self.cuts else None
                if most is not None and passed >= most:
                    self.cuts.pop(0)
                    return
        except OSError:
            return


class Line(LoopbackServer):
    """Passes bytes on both ways. While it is cut, nothing passes and no connection ends, as in a network partition."""

    def __init__(self, upstream: str):
        self._whole = asyncio.Event()
        self._whole.set()
        super().__init__(upstream)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def cut(self) -> None:
        """Hold back all bytes from now on."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        """Pass on what was held back, and what follows."""
        self._loop.call_soon_threadsafe(self._whole.set)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        connected = await self._connected()
        if connected is None:
            writer.close()
            return
        above, below = connected
        ways = [asyncio.create_task(self._pass(reader, below)), asyncio.create_task(self._pass(above, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await self._whole.wait()
        except asyncio.CancelledError:
            pass  # The server is closed. Python 3.11 would log a task that ends as cancelled.
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, below):
                end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(PIECE):
                await self._whole.wait()
                writer.write(part)
                await writer.drain()
