"""Requests of clients to a coordinator in the same process, without a socket.

httpx.ASGITransport is not used: it takes an answer that breaks off for a whole one, and it tries to import an optional
package in each request, which makes a request twice as slow if the package is not installed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
from fastapi import FastAPI


class InProcess(httpx.AsyncBaseTransport):
    """Hands each request to ``app`` and returns its whole answer. Errors look as they do over a socket."""

    def __init__(self, app: FastAPI):
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The app's answer.

        Raises:
            httpx.RemoteProtocolError: the answer broke off.
        """
        exchange = _AsgiExchange(await request.aread())
        # The app answers an error with status 500, and then raises it for a server's log.
        with suppress(Exception):
            await self._app(_scope(request), exchange.receive, exchange.send)
        if not exchange.ended.is_set() or exchange.status is None:
            raise httpx.RemoteProtocolError("the answer broke off", request=request)
        body = httpx.ByteStream(bytes(exchange.body))  # a client may ask for its parts, as large payloads are read
        return httpx.Response(exchange.status, headers=exchange.headers, stream=body, request=request)


class _AsgiExchange:
    """One request and its answer, as ASGI messages."""

    def __init__(self, content: bytes):
        self._content: bytes | None = content
        self.ended = asyncio.Event()
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    async def receive(self) -> dict[str, Any]:
        if self._content is None:
            await self.ended.wait()
            return {"type": "http.disconnect"}
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
            return
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.ended.set()


def _scope(request: httpx.Request) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.split(b"?")[0],
        "query_string": url.query,
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
    }
