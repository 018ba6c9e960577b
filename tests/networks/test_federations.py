"""Federations through what stands in sites' networks: the same state hash as over a direct connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service.http.coordinator_client import CoordinatorClient
from tests.networks.conftest import HOST
from tests.support.authority import Authority
from tests.support.coordinators import InThread, in_thread
from tests.support.networks import Line, SiteProxy
from tests.support.proxy import Proxy
from tests.support.real_clients import RealFederations, without_id
from tests.support.real_proxies import mitmproxy, squid

LOGIN = "ward:p%40ss"  # its password is p@ss
MEGABYTE = 1 << 20


def test_through_a_proxy_with_basic_authentication(
    coordinator: InThread, authority: Authority, federations: RealFederations, direct: dict[str, Any]
) -> None:
    with SiteProxy(coordinator.url, login="ward:p@ss") as proxy:
        url = f"https://{HOST}:{coordinator.url.rpartition(':')[2]}"
        through = proxy.url.replace("://", f"://{LOGIN}@")
        found = federations.run(coordinator, url, ca_file=authority.file, proxy=through)
        assert proxy.tunnels >= 2, "each client has a tunnel of its own"
    assert without_id(found) == direct


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[CoordinatorClient]:
    """The clients' connections, as they are made."""
    made: list[CoordinatorClient] = []
    begin = CoordinatorClient.__post_init__

    def noted(self: CoordinatorClient) -> None:
        begin(self)
        made.append(self)

    monkeypatch.setattr(CoordinatorClient, "__post_init__", noted)
    return made


@pytest.mark.extended
@pytest.mark.parametrize("by", ["option", "HTTPS_PROXY", "ALL_PROXY"])
def test_through_squid_with_basic_authentication(
    by: str,
    coordinator: InThread,
    authority: Authority,
    federations: RealFederations,
    direct: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with squid(HOST) as (url, log):
        through = url.replace("://", f"://{LOGIN}@")
        if by != "option":
            monkeypatch.setenv(by, through)
        given = {"proxy": through} if by == "option" else {}
        address = f"https://{HOST}:{coordinator.url.rpartition(':')[2]}"
        found = federations.run(coordinator, address, ca_file=authority.file, **given)
        logged = log.read_text()
    assert without_id(found) == direct
    assert f"CONNECT {HOST}" in logged
    assert " ward " in logged, "squid knows who it was"


@pytest.mark.extended
def test_through_mitmproxy_that_inspects_tls(
    coordinator: InThread,
    authority: Authority,
    federations: RealFederations,
    direct: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mitmproxy(tmp_path, authority) as (url, inspector):
        found = federations.run(coordinator, coordinator.url, ca_file=inspector, proxy=url)
        assert without_id(found) == direct
        # The authority may be among those of the system, where an administrator puts it.
        monkeypatch.setenv("SSL_CERT_FILE", str(inspector))
        found = federations.run(coordinator, coordinator.url, proxy=url)
    assert without_id(found) == direct


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_through_a_proxy_that_ends_idle_connections_after_20_seconds(
    coordinator: InThread,
    authority: Authority,
    federations: RealFederations,
    direct: dict[str, Any],
    clients: list[CoordinatorClient],
) -> None:
    with SiteProxy(coordinator.url, Line(idle=20.0)) as proxy:
        found = federations.run(coordinator, coordinator.url, pause=75.0, ca_file=authority.file, proxy=proxy.url)
        # The first poll of each client is cut; then they wait 15 s, and connections without a request may be cut.
        retries = [client.traffic.retries for client in clients]
        assert all(1 <= retried <= 2 for retried in retries), retries
        assert proxy.idled >= 2
    assert [client.poll_wait.seconds(30) for client in clients] == [15, 15]
    assert without_id(found) == direct


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    """A coordinator without TLS: what stands before it reads requests, as where it inspects TLS."""
    with in_thread(tmp_path_factory.mktemp("plain") / "data") as server:
        yield server


@pytest.mark.extended
def test_through_a_proxy_that_buffers(plain: InThread, federations: RealFederations, direct: dict[str, Any]) -> None:
    with Proxy(plain.url, lambda asked: "none") as proxy:
        found = federations.run(plain, proxy.url)
        assert proxy.seen["none"] > 10
    assert without_id(found) == direct


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_over_a_slow_line_that_loses_segments(
    coordinator: InThread, authority: Authority, federations: RealFederations, direct: dict[str, Any]
) -> None:
    with SiteProxy(coordinator.url, Line(rate=64_000.0, lost=0.05)) as line:
        found = federations.run(coordinator, line.url.replace("http://", "https://"), ca_file=authority.file)
        assert line.stalls > 0
    assert without_id(found) == direct
