"""Proxies that sites have: squid, mitmproxy and nginx, as processes. A test is skipped where one is not installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.authority import Authority
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


@contextmanager
def squid(host: str) -> Iterator[tuple[str, Path]]:
    """Debian's squid, for which ``host`` is this machine; its address, and the log of what was asked.

    Its only user is ward, with the password p@ss.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # started by root, squid goes on as another account
        yield from _squid(Path(folder), host)


def _squid(folder: Path, host: str) -> Iterator[tuple[str, Path]]:
    program = shutil.which("squid") or "/usr/sbin/squid"
    helper = Path("/usr/lib/squid/basic_ncsa_auth")
    if not Path(program).exists() or not helper.exists() or shutil.which("openssl") is None:
        pytest.skip("squid: apt-get install squid openssl")
    port, log = free_port(), folder / "access.log"
    hashed = subprocess.run(["openssl", "passwd", "-apr1", "p@ss"], capture_output=True, text=True, check=True)
    (folder / "users").write_text(f"ward:{hashed.stdout.strip()}\n")
    (folder / "hosts").write_text(f"127.0.0.1 {host}\n")
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


@contextmanager
def nginx(folder: Path, configuration: str, port: int) -> Iterator[None]:
    """Debian's nginx with the ``configuration`` of a server, which listens on ``port``."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        pytest.skip("nginx: apt-get install nginx")
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
access_log {folder}/access.log;
{paths}
{configuration}
}}
"""
    )
    with process([program, "-p", str(folder), "-c", str(folder / "nginx.conf")], port, folder / "nginx.out"):
        yield
