"""Federations through what stands in sites' networks: the same state hash as over a direct connection.

Networks: a forward proxy with a login, and TLS inspection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.coordinator_client import CoordinatorClient, http_to
from promptfed.client_service.joining.invited import AUTHORITY, accept
from promptfed.sdk.client import CA_VARIABLE, PROXY_VARIABLE
from tests.networks.conftest import HOST
from tests.support.authority import Authority
from tests.support.coordinators import InThread
from tests.support.loopback_server import LoopbackServer
from tests.support.real_clients import RealFederations, without_id

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


LOGIN = "ward:p%40ss"  # its password is p@ss


@pytest.fixture
def same(coordinator: InThread, federations: RealFederations, direct: dict[str, Any]) -> Callable[..., None]:
    """What comes of a federation whose clients reach the coordinator in this way is the same."""

    def check(url: str, **settings: Any) -> None:
        assert without_id(federations.run(coordinator, url, **settings)) == direct

    return check


def test_through_a_proxy_with_basic_authentication(
    coordinator: InThread, authority: Authority, proxy: SiteProxy, same: Callable[..., None]
) -> None:
    same(named(coordinator), ca_file=authority.file, proxy=with_login(proxy))
    assert proxy.tunnels >= 2, "each client has a tunnel of its own"


# Proxies: where they are named, what they refuse, and polls that they cut.


VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", PROXY_VARIABLE, CA_VARIABLE)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        for spelt in (name, name.lower()):
            monkeypatch.setenv(spelt, "")  # put back afterwards, also where a command sets it
            monkeypatch.delenv(spelt)


@pytest.fixture
def proxy(coordinator: InThread) -> Iterator[SiteProxy]:
    with SiteProxy(coordinator.url, login="ward:p@ss") as running:
        yield running


def named(coordinator: InThread) -> str:
    """The coordinator's address by a name that only the proxy knows."""
    return f"https://{HOST}:{coordinator.url.rpartition(':')[2]}"


def with_login(proxy: SiteProxy) -> str:
    return proxy.url.replace("://", f"://{LOGIN}@")


def refusal(url: str, authority: Authority, proxy: str | None, give_up_after: float = 5.0) -> ClientError:
    """The error that ends a client which asks for a federation's offer."""

    async def ask() -> None:
        async with http_to(url, authority.file, None, proxy) as http:
            await CoordinatorClient(http, url, "pets", give_up_after).enrolment("0" * 64)

    with pytest.raises(ClientError) as error:
        asyncio.run(ask())
    return error.value


def test_the_command_and_the_library_go_through_it(
    coordinator: InThread, authority: Authority, proxy: SiteProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(coordinator.operator["Authorization"].removeprefix("Bearer "))
    options = ["--ca-file", str(authority.file), "--proxy", with_login(proxy)]
    listing = ["federation", "list", "--coordinator", named(coordinator), "--token-file", str(token)]
    done = CliRunner().invoke(app, [*options, *listing])
    assert done.exit_code == 0, done.output
    monkeypatch.delenv(PROXY_VARIABLE)
    done = CliRunner().invoke(app, listing)
    assert done.exit_code == Exit.UNREACHABLE
    assert "no host has this name" in done.stderr
    monkeypatch.setenv("HTTPS_PROXY", with_login(proxy))
    with promptfed.connect(named(coordinator), token_file=token) as api:
        assert isinstance(api.federations(), list)
    assert proxy.tunnels == 2
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    done = CliRunner().invoke(app, listing)
    assert "the proxy wants a login" in done.stderr


def test_an_invitation_is_accepted_through_it(
    coordinator: InThread, authority: Authority, proxy: SiteProxy, tmp_path: Path
) -> None:
    federation = coordinator.create(name="invited")
    answer = coordinator.post(f"{federation}/enrolment-tokens", {"uses": 1, "address": named(coordinator)}, status=201)
    given = {"name": "ward", "data": "none", "proxy": with_login(proxy), "state_dir": tmp_path / "state"}
    settings = accept(answer["invitation"], given)
    assert settings.ca_file == tmp_path / "state" / AUTHORITY
    assert proxy.tunnels == 2, "once verified, once not"


def test_inspected_tls_needs_the_proxys_authority(coordinator: InThread, authority: Authority, tmp_path: Path) -> None:
    inspector = Authority(tmp_path, "inspector")
    certificate = inspector.sign("all", HOST)
    with SiteProxy(coordinator.url, inspecting=certificate) as proxy:
        refused = refusal(named(coordinator), authority, proxy.url)
        assert refused.exit == Exit.UNREACHABLE
        assert "--ca-file" in str(refused)

        async def health() -> tuple[int, str]:
            async with http_to(named(coordinator), inspector.file, None, proxy.url) as http:
                answer = await http.get(f"{named(coordinator)}/healthz")
                return answer.status_code, answer.http_version

        assert asyncio.run(health()) == (200, "HTTP/1.1")
        assert "h2" not in proxy.protocols, "it is offered, and not chosen"


@pytest.mark.parametrize(("status", "text"), [(407, "wants a login"), (403, "refuses to connect")])
def test_a_proxy_s_refusal_ends_a_client(status: int, text: str, coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, refusal=status) as proxy:
        refused = refusal(named(coordinator), authority, proxy.url.replace("://", "://ward:secret@"), 60.0)
    assert refused.exit == Exit.UNREACHABLE
    assert text in str(refused)
    assert named(coordinator) in str(refused)
    assert "secret" not in str(refused)


def test_a_proxy_that_cannot_reach_the_coordinator_is_asked_again(coordinator: InThread, authority: Authority) -> None:
    with SiteProxy(coordinator.url, refusal=503) as proxy:
        refused = refusal(named(coordinator), authority, proxy.url, 0.3)
    assert "the proxy answers 503" in str(refused)


@pytest.mark.parametrize(
    ("proxy", "text"),
    [
        ("socks5://ward:secret@proxy.test:1080", "speaks SOCKS"),
        ("ftp://ward:secret@proxy.test:21", "cannot be used: write http://HOST:PORT"),
        ("http://ward:secret@proxy.test", "cannot be used"),
        ("http://ward:secret@proxy.test:port", "cannot be used"),
    ],
)
def test_a_proxy_that_is_unusable(proxy: str, text: str, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refusal(f"https://{HOST}", authority, proxy)
    assert refused.exit == Exit.USAGE
    assert text in str(refused)
    assert "secret" not in str(refused)
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert str(refusal(f"https://{HOST}", authority, None)) == str(refused)
    unreached = refusal("https://127.0.0.1:1", authority, None, 0.1)
    assert unreached.exit == Exit.UNREACHABLE, "loopback is reached without"
