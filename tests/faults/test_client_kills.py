"""Kill -9 on real clients and their coordinator alike: the run ends where an undisturbed one ends.

The clients train on images with the embedded backbone. Methods that keep private state between rounds are among them
(FedPGP's adaptation, pFedPG's head, FaST-PT's transforms and domain prompt), so that an update lost, sent twice or
trained again from the wrong state would show in the hashes or in the accuracies.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.exits import Exit
from promptfed.shared.data.classes import TOPICS
from tests.support import forked_client
from tests.support.coordinators import ForkedCoordinator, fork_server
from tests.support.ports import free_port
from tests.support.whole_federation import outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SITES = {"north": "symbols:painting", "south": "symbols:cartoon", "west": "symbols:neon"}
DATA = f"{{}}?topic={min(TOPICS)}&per_class=2&test_per_class=2"
ROUNDS, KILLS = 6, 24
METHODS: dict[str, dict[str, Any]] = {
    "promptfl": {"m": 2}, "fedpgp": {"m": 2}, "fedtpg": {"m": 2}, "plan": {"m": 2, "depth": 2}, "pfedpg": {"m": 2},
    "fast_pt": {"m": 2, "mst_epochs": 10},
}  # fmt: skip


@dataclass
class Client:
    """One client of a federation, as a process that can be killed and started again."""

    name: str
    folder: Path
    arguments: list[str]
    _child: Any = field(default=None)

    def start(self) -> None:
        log = str(self.folder / f"{self.name}.log")
        self._child = fork_server().Process(target=forked_client.run, args=(self.arguments, log))
        self._child.start()

    @property
    def code(self) -> int | None:
        found: int | None = self._child.exitcode
        return found

    def kill(self) -> None:
        if self.code is None:
            os.kill(self._child.pid, signal.SIGKILL)
        self._child.join(30)

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()


def started(process: ForkedCoordinator, folder: Path, method: str, features: Path) -> tuple[str, list[Client]]:
    """A federation that waits for its clients, and the clients, running."""
    name, _, up = method.partition(" with ")
    spec: dict[str, Any] = {
        "name": "kills", "method": {"name": name, **METHODS[name]}, "backbone": {"model": "promptfed-tiny"},
        "compression": {"up": up or "none"}, "rounds": ROUNDS,
        "training": {"batch_size": 4, "learning_rate": 0.05, "epochs": 6},
        "participation": {"min_clients": len(SITES), "deadline_seconds": 600}, "start": "when_ready", "seed": 5,
    }  # fmt: skip
    federation = process.post("/v1/federations", spec, status=201)["id"]
    (folder / "token").write_text(process.token(federation))
    common = {
        "coordinator": process.url, "federation": federation, "enrolment-token-file": folder / "token",
        "feature-cache": features, "device": "cpu", "give-up-after": 300,
    }  # fmt: skip
    clients = []
    for name, data in SITES.items():
        own = common | {"name": name, "data": DATA.format(data), "state-dir": folder / name}
        clients.append(Client(name, folder, [f"--{key}={value}" for key, value in own.items()]))
        clients[-1].start()
    return federation, clients


def named(victim: Client | None) -> str:
    return "coordinator" if victim is None else victim.name


def state_of(process: ForkedCoordinator, federation: str) -> str:
    try:
        return str(process.get(federation)["state"])
    except httpx.TransportError:
        return "away"


def run(
    folder: Path, method: str, features: Path, kills: int, options: Sequence[str] = ()
) -> tuple[dict[str, Any], Counter[str]]:
    """A whole federation with so many kills of anybody; what came of it, and who was killed how often."""
    folder.mkdir()
    process = ForkedCoordinator(folder / "coordinator", "--port", str(free_port()), *options)
    federation, clients = started(process, folder, method, features)
    chance, killed, end = random.Random(7), Counter[str](), time.monotonic() + 900
    try:
        while state_of(process, federation) != "finished":
            assert time.monotonic() < end, [client.log()[-2000:] for client in clients]
            pause = chance.uniform(0.05, 0.7)
            if killed.total() < kills:
                time.sleep(pause)
                fewest = min(killed[name] for name in (*SITES, "coordinator"))  # a quick run has each killed too
                victim = chance.choice([one for one in (*clients, None) if killed[named(one)] == fewest])
                if victim is None:
                    process.kill()
                    process.start()
                    killed[named(victim)] += 1
                elif victim.code is None:
                    victim.kill()
                    victim.start()
                    killed[named(victim)] += 1
            else:
                time.sleep(0.2)
            for client in clients:
                assert client.code in (None, Exit.OK), client.log()
        found = outcome(process, federation)
        for client in clients:
            client._child.join(60)
            assert client.code == Exit.OK, client.log()
        return found, killed
    finally:
        for client in clients:
            client.kill()
        process.kill()


@pytest.mark.both_databases
@pytest.mark.parametrize("method", [*METHODS, "promptfl with int8"])
def test_clients_and_coordinator_killed_at_random_end_where_an_undisturbed_run_ends(
    tmp_path: Path, method: str, database: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    features = tmp_path / "features"
    expected, _ = run(tmp_path / "quiet", method, features, kills=0)
    assert len(set(expected["hashes"])) == ROUNDS + 1
    options = ["--database-url", request.getfixturevalue("postgres").schema()] if database else []
    found, killed = run(tmp_path / "killed", method, features, KILLS, options)
    print(f"\n{method} on {'PostgreSQL' if database else 'SQLite'}: killed {dict(killed)}")
    assert found == expected
    assert killed.total() >= KILLS // 2
    assert len(killed) == len(SITES) + 1, "everybody was killed at least once"
