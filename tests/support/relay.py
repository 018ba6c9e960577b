"""A line that is cut: bytes are passed on both ways and counted, and connections end in the middle by plan."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

PIECE = 16 << 10


@dataclass
class Cut:
    """A connection that carries so many bytes up, or down, ends there."""

    up: int | None = None
    down: int | None = None


@dataclass
class Relay:
    """Serves on a free port in a thread of its own. Each cut is for the next connection that reaches it."""

    upstream: str
    cuts: list[Cut] = field(default_factory=list)
    up: int = 0
    down: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="relay")
        self._thread.start()
        assert started.wait(30)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        started.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.upstream.removeprefix("http://").split(":")
        try:
            above, below = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.create_task(self._pass(reader, below, "up")),
            asyncio.create_task(self._pass(above, writer, "down")),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, below):
                end.close()

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
