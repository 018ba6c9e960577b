"""The recommended configuration of nginx in front of a coordinator."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from promptfed.shared.clip import FeatureCache, load_backbone
from tests import ROOT
from tests.support.authority import Authority
from tests.support.coordinators import InThread, in_thread
from tests.support.ports import free_port
from tests.support.real_clients import RealFederations, without_id
from tests.support.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.extended


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data", forwarded_allow_ips="127.0.0.1") as server:
        yield server


@contextmanager
def nginx(folder: Path, configuration: str, port: int) -> Iterator[None]:
    """Debian's nginx with the ``configuration`` of a server, which listens on ``port``."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        pytest.skip("nginx: apt-get install nginx")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    inside = f"access_log {folder}/access.log;" + "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    log = f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;"
    (folder / "nginx.conf").write_text(f"{log} events {{}}\nhttp {{ {inside}\n{configuration}\n}}")
    running = subprocess.Popen([program, "-p", str(folder), "-c", str(folder / "nginx.conf")])

    def answers() -> bool:
        assert running.poll() is None
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        wait_for("nginx", answers)
        yield
    finally:
        running.terminate()
        running.wait(PATIENCE)


def test_a_federation_behind_nginx(coordinator: InThread, tmp_path: Path) -> None:
    authority, port = Authority(tmp_path, "authority"), free_port()
    own = authority.sign("coordinator", "127.0.0.1")
    configuration = (ROOT / "deploy" / "nginx" / "promptfed.conf").read_text()
    for given, here in (
        ("server 127.0.0.1:8080", f"server {coordinator.url.removeprefix('http://')}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/coordinator.pem", str(own)),
        ("/etc/ssl/coordinator.key", str(own)),
    ):
        assert configuration.count(f"{given};") == 1
        configuration = configuration.replace(f"{given};", f"{here};")
    torch.set_num_threads(1)
    backbone = load_backbone("promptfed-tiny", None)
    federations = RealFederations(tmp_path, backbone, FeatureCache(tmp_path / "features"))
    tower = {"method": {"name": "fedavg"}, "rounds": 1, "training": {"learning_rate": 0.001, "batch_size": 8}}
    straight = without_id(federations.run(coordinator, coordinator.url, spec=tower))
    with nginx(tmp_path, configuration, port):
        url = f"https://127.0.0.1:{port}"
        assert without_id(federations.run(coordinator, url, spec=tower, ca_file=authority.file)) == straight
    assert " 413 " not in (tmp_path / "access.log").read_text()
