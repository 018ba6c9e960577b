"""What a site's network does to connections: a forward proxy with a login, and TLS inspection."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.loopback_server import LoopbackServer

SEGMENT = 1460  # bytes of a TCP segment on Ethernet


class SiteProxy(LoopbackServer):
    """Passes bytes to ``upstream``: those of callers, or after CONNECT (to any name) those of the tunnel.

    ``login``: USER:PASSWORD that CONNECT must bring; ``refusal``: the status that it answers instead; ``header``: of
    its answers. With
    ``inspecting``, a certificate with its key, it ends TLS itself and speaks TLS to ``upstream``.
    ``tunnels`` counts; ``protocols`` are those that callers chose when it inspects.
    """

    def __init__(
        self,
        upstream: str,
        *,
        login: str = "",
        refusal: int = 0,
        scheme: str = "Basic",
        header: str = "X-Proxy: test",
        inspecting: Path | None = None,
    ):
        self._login, self._refusal, self._scheme = login, refusal, scheme
        self._inspecting, self._header = inspecting, header
        self.tunnels = 0
        self.protocols: set[str | None] = set()
        super().__init__(upstream)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            first = await reader.read(8)
            if first.startswith(b"CONNECT "):
                head = first + await reader.readuntil(b"\r\n\r\n")
                if not await self._connects(head, writer):
                    return
                first = b""
            await self._tunnel(reader, writer, first)
        writer.close()

    async def _connects(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer CONNECT; whether there is a tunnel now."""
        expected = b"basic " + base64.b64encode(self._login.encode())
        given = [
            line.partition(b":")[2].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"proxy-auth")
        ]
        status = self._refusal or (407 if self._login and [_lower(text) for text in given] != [expected] else 200)
        challenge = f"Proxy-Authenticate: {self._scheme} realm=site\r\n" if status == 407 else ""
        length = "" if status == 200 else "Content-Length: 0\r\nConnection: close\r\n"
        writer.write(f"HTTP/1.1 {status} Answer\r\n{self._header}\r\n{challenge}{length}\r\n".encode())
        await writer.drain()
        if status != 200:
            writer.close()
            return False
        self.tunnels += 1
        if self._inspecting is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._inspecting)
            context.set_alpn_protocols(["h2", "http/1.1"])
            await writer.start_tls(context)
            self.protocols.add(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        return True

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
        async with self._reached() as (above, below):
            below.write(first)
            ways = [asyncio.create_task(self._pass(reader, below)), asyncio.create_task(self._pass(above, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                writer.close()

    @contextlib.asynccontextmanager
    async def _reached(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        scheme, _, place = self.upstream.partition("://")
        host, _, port = place.partition(":")
        context = None
        if scheme == "https" and self._inspecting is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        above, below = await asyncio.open_connection(host, int(port), ssl=context)
        try:
            yield above, below
        finally:
            below.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(SEGMENT):
                writer.write(part)
                await writer.drain()


def _lower(authorization: bytes) -> bytes:
    scheme, _, rest = authorization.partition(b" ")
    return scheme.lower() + b" " + rest
