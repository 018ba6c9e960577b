"""What stands between a client and its coordinator in tests: a server on loopback whose connections are passed on."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from tests.support.waiting import PATIENCE


class LoopbackServer:
    """Serves on a free port in a thread of its own until ``close``; what a connection gets says ``_accept``."""

    def __init__(self, upstream: str):
        self.upstream = upstream
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=type(self).__name__)
        self._thread.start()
        assert started.wait(PATIENCE)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
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
        raise NotImplementedError

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to what stands behind; None where nobody is at home."""
        host, port = self.upstream.removeprefix("http://").split(":")
        try:
            return await asyncio.open_connection(host, int(port))
        except OSError:
            return None
