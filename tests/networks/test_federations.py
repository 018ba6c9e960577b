"""Federations through what stands in sites' networks: the same state hash as over a direct connection."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service.http import transfers
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from tests.networks.conftest import HOST
from tests.support.authority import Authority
from tests.support.coordinators import InThread, in_thread
from tests.support.networks import Line, SiteProxy
from tests.support.proxy import ProxiedRequest, Proxy, Trouble
from tests.support.real_clients import RealFederations, without_id
from tests.support.waiting import PATIENCE

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
    with squid() as (url, log):
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


@pytest.mark.extended
def test_through_a_proxy_that_takes_bodies_of_a_megabyte(plain: InThread, federations: RealFederations) -> None:
    tower = {"method": {"name": "fedavg"}, "rounds": 1, "training": {"learning_rate": 0.001, "batch_size": 8}}
    straight = without_id(federations.run(plain, plain.url, spec=tower))
    sizes: list[int] = []

    def limited(asked: ProxiedRequest) -> Trouble:
        sizes.append(asked.size)
        return "too-large" if asked.size > MEGABYTE else "none"

    with Proxy(plain.url, limited) as proxy:
        assert without_id(federations.run(plain, proxy.url, spec=tower)) == straight
        # Each client learns it once, or a few times where the connection ends before it has read the answer.
        assert 2 <= proxy.seen["too-large"] <= 8
    assert max(size for size in sizes if size <= MEGABYTE) > transfers.SMALLEST_PART


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_over_a_slow_line_that_loses_segments(
    coordinator: InThread, authority: Authority, federations: RealFederations, direct: dict[str, Any]
) -> None:
    with SiteProxy(coordinator.url, Line(rate=64_000.0, lost=0.05)) as line:
        found = federations.run(coordinator, line.url.replace("http://", "https://"), ca_file=authority.file)
        assert line.stalls > 0
    assert without_id(found) == direct


@contextmanager
def squid() -> Iterator[tuple[str, Path]]:
    """Debian's squid with one user, which knows `HOST`; its address, and the log of what was asked."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # started by root, squid goes on as another account
        yield from _squid(Path(folder))


def _squid(folder: Path) -> Iterator[tuple[str, Path]]:
    program = shutil.which("squid") or "/usr/sbin/squid"
    helper = Path("/usr/lib/squid/basic_ncsa_auth")
    if not Path(program).exists() or not helper.exists() or shutil.which("openssl") is None:
        pytest.skip("squid: apt-get install squid openssl")
    port, log = free_port(), folder / "access.log"
    hashed = subprocess.run(["openssl", "passwd", "-apr1", "p@ss"], capture_output=True, text=True, check=True)
    (folder / "users").write_text(f"ward:{hashed.stdout.strip()}\n")
    (folder / "hosts").write_text(f"127.0.0.1 {HOST}\n")
    (folder / "squid.conf").write_text(
        f"""http_port 127.0.0.1:{port}
auth_param basic program {helper} {folder}/users
auth_param basic children 1
acl known proxy_auth REQUIRED
http_access allow known
http_access deny all
hosts_file {folder}/hosts
access_log stdio:{log}
logfile_rotate 0
buffered_logs off
cache_log {folder}/cache.log
cache deny all
pid_filename {folder}/squid.pid
coredump_dir {folder}
max_filedescriptors 512
shutdown_lifetime 0 seconds
pinger_enable off
"""
    )
    with process([program, "-N", "-f", str(folder / "squid.conf")], port, folder / "squid.out"):
        yield f"http://127.0.0.1:{port}", log


@contextmanager
def mitmproxy(folder: Path, authority: Authority) -> Iterator[tuple[str, Path]]:
    """mitmdump, which trusts ``authority``; its address, and its own authority's certificate."""
    program = shutil.which("mitmdump")
    if program is None:
        pytest.skip("mitmproxy: pip install mitmproxy into an environment of its own, and put its mitmdump on the PATH")
    port, home = free_port(), folder / "mitmproxy"
    options = ["--set", f"confdir={home}", "--set", f"ssl_verify_upstream_trusted_ca={authority.file}"]
    command = [program, "--listen-host", "127.0.0.1", "--listen-port", str(port), "--quiet", *options]
    with process(command, port, folder / "mitmproxy.out"):
        yield f"http://127.0.0.1:{port}", home / "mitmproxy-ca-cert.pem"


@contextmanager
def process(command: list[str], port: int, log: Path) -> Iterator[None]:
    """A server for the length of a block, which listens on ``port`` of loopback."""
    with log.open("wb") as file:
        running = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until(lambda: running.poll() is not None or answers(port))
        assert running.poll() is None, log.read_text()
        yield
    finally:
        running.terminate()
        running.wait(PATIENCE)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
