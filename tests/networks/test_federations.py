"""Federations through what stands in sites' networks: the same state hash as over a direct connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.networks.conftest import HOST
from tests.support.authority import Authority
from tests.support.coordinators import InThread
from tests.support.networks import SiteProxy
from tests.support.real_clients import RealFederations, without_id
from tests.support.real_proxies import mitmproxy, squid

LOGIN = "ward:p%40ss"  # its password is p@ss


def test_through_a_proxy_with_basic_authentication(
    coordinator: InThread, authority: Authority, federations: RealFederations, direct: dict[str, Any]
) -> None:
    with SiteProxy(coordinator.url, login="ward:p@ss") as proxy:
        url = f"https://{HOST}:{coordinator.url.rpartition(':')[2]}"
        through = proxy.url.replace("://", f"://{LOGIN}@")
        found = federations.run(coordinator, url, ca_file=authority.file, proxy=through)
        assert proxy.tunnels >= 2, "each client has a tunnel of its own"
    assert without_id(found) == direct


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
