"""Three coordinators on one database with real clients: one is killed for good, then another one is stopped for good.

How long each client waited is read from its own log: from the signal until the line that names the coordinator that
serves it now. A federation that trains is followed by the command meanwhile; another one has not begun, so that its
clients wait in polls.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from promptfed.testing.coordinator import OperatorCalls
from tests.support import forked_client
from tests.support.coordinators import fork_server
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, TOKEN, AnyOf
from tests.support.takeovers import Group
from tests.support.waiting import PATIENCE, wait_for

LONGEST_WAIT = 10.0
ROUNDS = 30
TRAINING, WAITING = ("north", "south"), ("east", "west")


class RealClient:
    """One client in a process of its own, which is given the addresses of ``coordinator``."""

    def __init__(self, folder: Path, federation: str, name: str, coordinator: str, token: Path):
        self.name, self.federation = name, federation
        self.log = folder / f"{name}.log"
        self.state = folder / name
        options = {
            "coordinator": coordinator,
            "federation": federation,
            "name": name,
            "data": "symbols:sketch?classes=base&per_class=2",
            "state-dir": str(self.state),
            "enrolment-token-file": str(token),
            "device": "cpu",
            "log-format": "json",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        self.process: multiprocessing.process.BaseProcess = fork_server().Process(
            target=forked_client.run, args=(arguments, str(self.log))
        )
        self.process.start()

    def served_since(self, moment: float) -> float | None:
        """Seconds after ``moment`` (epoch) until another coordinator served this client; None if none has."""
        for line in self.log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            at = datetime.fromisoformat(entry["time"]).timestamp() if "time" in entry else 0.0
            if at > moment and "serves this client now" in entry.get("message", ""):
                return at - moment
        return None

    def stop(self) -> None:
        """Leave nothing running."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(PATIENCE)


def holder(group: Group, federation: str) -> str | None:
    """The address of the coordinator that works."""
    for url, process in group.processes.items():
        if process.dead:
            continue
        try:
            if httpx.get(f"{url}/v1/federations/{federation}", headers=OPERATOR, timeout=2).status_code == 200:
                return url
        except httpx.TransportError:
            continue
    return None


def enrolled(
    api: OperatorCalls, group: Group, folder: Path, federation: str, names: tuple[str, ...]
) -> list[RealClient]:
    """A federation with these clients, each of which knows all addresses."""
    spec = {"rounds": ROUNDS, "training": {"batch_size": 8, "epochs": 1}, "participation": {"min_clients": len(names)}}
    api.create(name=federation, **spec)
    token = folder / f"{federation}.token"
    token.write_text(api.token(federation, uses=len(names)))
    return [RealClient(folder, federation, name, ",".join(group.urls), token) for name in names]


def disturb(group: Group, clients: list[RealClient], number: int) -> dict[str, float]:
    """Signal the holder of the federation that trains; by client, seconds until another coordinator served it."""
    wait_for("a holder", lambda: holder(group, "training") is not None)
    gone = holder(group, "training")
    assert gone is not None
    affected = [client for client in clients if holder(group, client.federation) == gone]
    moment = time.time()
    group.processes[gone].signal(number)
    wait_for("service", lambda: all(client.served_since(moment) for client in affected), seconds=60, every=0.2)
    return {client.name: client.served_since(moment) or 0.0 for client in affected}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_client_waits_long_when_coordinators_are_gone(group: Group, tmp_path: Path) -> None:
    asker = AnyOf(group.urls)
    api = ResendingApi(asker, OPERATOR)
    clients = enrolled(api, group, tmp_path, "training", TRAINING) + enrolled(api, group, tmp_path, "waiting", WAITING)
    watching = None
    try:
        for federation in ("training", "waiting"):
            wait_for("enrolment", lambda name=federation: len(api.get(f"{name}/clients")["clients"]) == 2)
        api.post("training/start")
        environment = {**os.environ, "PROMPTFED_OPERATOR_TOKEN": TOKEN, "PROMPTFED_COORDINATOR": ",".join(group.urls)}
        command = [sys.executable, "-m", "promptfed", "federation", "watch", "training"]
        watching = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        wait_for("the first rounds", lambda: api.get("training")["round"] >= 3)

        waited = {"killed": disturb(group, clients, signal.SIGKILL)}
        begun = api.get("training")["round"]
        wait_for("another round", lambda: api.get("training")["round"] > begun)
        waited["stopped"] = disturb(group, clients, signal.SIGSTOP)
        print(json.dumps(waited))
        (tmp_path / "waited.json").write_text(json.dumps(waited))

        assert set(waited["killed"]) >= set(TRAINING)
        assert set(waited["stopped"]) >= set(TRAINING)
        for how, seconds in waited.items():
            assert max(seconds.values()) <= LONGEST_WAIT, f"{how}: {seconds}"
        for client in clients:
            assert json.loads((client.state / "coordinators.json").read_text()) == group.urls
        wait_for("the end", lambda: api.get("training")["state"] == "finished")
        assert api.get("training")["round"] == ROUNDS
        _, log = watching.communicate(timeout=PATIENCE)
        assert watching.returncode == 0, log
        for client in clients:
            if client.federation == "training":
                client.process.join(PATIENCE)
                assert client.process.exitcode == 0, client.log.read_text()
    finally:
        if watching is not None and watching.poll() is None:
            watching.kill()
        for client in clients:
            client.stop()
        asker.close()
