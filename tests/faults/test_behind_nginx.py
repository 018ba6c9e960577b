"""The guide's nginx before three coordinators that wait for each other: clients know one address, and go on."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_nginx import nginx
from tests.faults.test_gone_coordinator import ROUNDS, TRAINING, RealClient, holder
from tests.support.ports import free_port
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, AnyOf
from tests.support.takeovers import Group
from tests.support.waiting import wait_for

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/databases.md"
READ_TIMEOUT = 60.0  # seconds, of the guide's nginx


@pytest.fixture
def address(group: Group, tmp_path: Path) -> Iterator[str]:
    """The guide's proxy on loopback, without its TLS."""
    [text] = re.findall(r"```nginx\n(upstream coordinators.*?)```", GUIDE.read_text(), re.DOTALL)
    servers = "".join(f"    server {url.removeprefix('http://')};\n" for url in group.urls)
    port = free_port()
    text = re.sub(r"(?:    server 10\S+;\n)+", servers, text).replace("https://coordinators", "http://coordinators")
    (tmp_path / "nginx").mkdir()
    with nginx(tmp_path / "nginx", text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};"), port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_of_one_address_go_on(group: Group, address: str, tmp_path: Path) -> None:
    asker = AnyOf([address])
    api = ResendingApi(asker, OPERATOR)
    spec = {"rounds": ROUNDS, "training": {"batch_size": 8, "epochs": 1}, "participation": {"min_clients": 2}}
    api.create(name="training", **spec)
    token = tmp_path / "token"
    token.write_text(api.token("training", uses=2))
    clients = [RealClient(tmp_path, "training", name, address, token) for name in TRAINING]
    try:
        wait_for("enrolment", lambda: len(api.get("training/clients")["clients"]) == 2)
        api.post("training/start")
        wait_for("the first rounds", lambda: api.get("training")["round"] >= 3)
        waited = {}
        for number in (signal.SIGKILL, signal.SIGSTOP):
            gone = holder(group, "training")
            assert gone is not None
            group.processes[gone].signal(number)
            begun, moment = api.get("training")["round"], time.monotonic()
            wait_for("another round", lambda begun=begun: api.get("training")["round"] > begun + 1, seconds=200)
            waited[signal.Signals(number).name] = time.monotonic() - moment
        print(json.dumps(waited))
        assert waited["SIGKILL"] <= 20, "nginx asks the next one at once, and that one takes over"
        assert waited["SIGSTOP"] <= READ_TIMEOUT + 20, "what a stopped process holds costs the proxy's own time"
        wait_for("the end", lambda: api.get("training")["state"] == "finished")
        assert api.get("training")["round"] == ROUNDS
    finally:
        for client in clients:
            client.stop()
        asker.close()
