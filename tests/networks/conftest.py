"""A coordinator with TLS, the authority behind it, and federations of real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.http import connection
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.service.net import trust
from tests.support.authority import Authority
from tests.support.coordinators import TIMEOUT, InThread
from tests.support.real_clients import RealFederations, without_id
from tests.support.waiting import PATIENCE

HOST = "coordinator.test"  # a name that only proxies know


@pytest.fixture(scope="package")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="package")
def coordinator(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    own = authority.sign("coordinator", HOST, "127.0.0.1")
    server = InThread(
        tmp_path_factory.mktemp("coordinator") / "data", tls_cert=own, tls_key=own, forwarded_allow_ips="127.0.0.1",
        auth_failures_per_minute=100_000,
    )  # fmt: skip
    server.url = server.url.replace("http://", "https://")
    server.http = httpx.Client(base_url=server.url, verify=trust(authority.file), timeout=TIMEOUT)
    yield server
    server.stop()


@pytest.fixture(scope="package")
def backbone() -> Backbone:
    return load_backbone("promptfed-tiny", None)


@pytest.fixture(scope="package")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


@pytest.fixture
def federations(backbone: Backbone, features: FeatureCache, tmp_path: Path) -> RealFederations:
    return RealFederations(tmp_path, backbone, features, seconds=4 * PATIENCE)


@pytest.fixture(scope="package")
def direct(
    coordinator: InThread,
    authority: Authority,
    backbone: Backbone,
    features: FeatureCache,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What comes of a federation whose clients reach the coordinator directly."""
    straight = RealFederations(tmp_path_factory.mktemp("direct"), backbone, features)
    return without_id(straight.run(coordinator, coordinator.url, ca_file=authority.file))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try again at once."""
    monkeypatch.setattr(connection, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(connection, "LONGEST_BACKOFF", 0.1)
