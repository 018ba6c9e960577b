"""Coordinators and clients of three releases, in every pair: the same federation comes to the same state.

Each wheel is built from git. Clients are replaced in the middle by a later and by an earlier release, coordinators by
later ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.releases.wheels import CURRENT, RELEASES, Coordinator, Process, unpacked
from tests.support.client_processes import wait_for
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

SITES = {"north": "symbols:painting", "south": "symbols:cartoon"}
ROUNDS = 3
DATA = "?topic=games&per_class=2&test_per_class=1"
PAIRS = [(coordinator, client) for coordinator in RELEASES for client in RELEASES]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {release: unpacked(release, tmp_path_factory.mktemp(release) / "built") for release in RELEASES}


class Federation:
    """A federation whose coordinator and clients can be replaced by those of other releases."""

    def __init__(self, folder: Path, coordinator: Path, **spec: Any):
        self.coordinator = Coordinator(folder / "coordinator", free_port())
        self.coordinator.start(coordinator)
        base = {
            "name": "pairs",
            "method": {"name": "promptfl", "m": 4},
            "rounds": ROUNDS,
            "training": {"epochs": 4, "batch_size": 4, "learning_rate": 0.02},
            "participation": {"min_clients": len(SITES), "deadline_seconds": 300.0},
            "seed": 3,
        }
        self.path = "/v1/federations/" + self.coordinator.call("POST", "/v1/federations", json=base | spec)["id"]
        minted = self.coordinator.call("POST", self.path + "/enrolment-tokens", json={"uses": 4})
        (folder / "token").write_text(minted["token"])
        self.clients = {site: self._client(folder / site, site, uri, folder) for site, uri in SITES.items()}

    def _client(self, own: Path, site: str, uri: str, folder: Path) -> Process:
        return Process(
            "promptfed.client_service",
            own,
            f"--state-dir={own / 'state'}",
            "--device=cpu",
            "--give-up-after=120",
            f"--coordinator={self.coordinator.url}",
            "--federation=pairs",
            f"--enrolment-token-file={folder / 'token'}",
            f"--feature-cache={folder / 'features'}",
            f"--name={site}",
            "--role=trainer",
            f"--data={uri}{DATA}",
        )

    def get(self, path: str = "") -> Any:
        return self.coordinator.call("GET", self.path + path)

    def wait_for_clients(self) -> None:
        wait_for(lambda: self._died() or len(self.get("/clients")["clients"]) == len(SITES), PATIENCE, 0.2)
        assert not self._died(), self.logs()

    def wait_for_round(self, round: int) -> None:
        wait_for(lambda: self._died() or self.get()["round"] >= round, PATIENCE, 0.05)
        assert not self._died(), self.logs()

    def _died(self) -> bool:
        return any(client.process.poll() not in (None, 0) for client in self.clients.values())

    def result(self) -> str:
        """The final state's hash, when every client has ended well."""
        for client in self.clients.values():
            assert client.process.wait(PATIENCE) == 0, self.logs()
        final = self.get()
        assert (final["state"], final["round"]) == ("finished", ROUNDS), final
        return str(final["state_hash"])

    def logs(self) -> str:
        return "\n".join(service.log() for service in (self.coordinator, *self.clients.values()))

    def stop(self) -> None:
        for service in (*self.clients.values(), self.coordinator):
            if hasattr(service, "process"):
                service.stop()


@pytest.fixture(scope="module")
def hashes() -> dict[tuple[str, str], str]:
    return {}


@pytest.mark.parametrize(("coordinator", "client"), PAIRS)
def test_a_pair_comes_to_the_same_state(
    coordinator: str, client: str, installed: dict[str, Path], hashes: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    """``south`` is replaced twice: by the following release, and by the one that it was."""
    other = RELEASES[(RELEASES.index(client) + 1) % len(RELEASES)]
    federation = Federation(tmp_path, installed[coordinator])
    south = federation.clients["south"]
    try:
        for site in federation.clients.values():
            site.start(installed[client])
        federation.wait_for_clients()
        federation.coordinator.call("POST", federation.path + "/start")
        for round, release in ((1, other), (2, client)):
            federation.wait_for_round(round)
            south.stop()
            south.start(installed[release])
        hashes[coordinator, client] = federation.result()
    finally:
        federation.stop()
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize("client", RELEASES)
def test_a_coordinator_is_replaced_by_later_releases(
    client: str, installed: dict[str, Path], hashes: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    federation = Federation(tmp_path, installed[RELEASES[0]])
    try:
        for site in federation.clients.values():
            site.start(installed[client])
        federation.wait_for_clients()
        federation.coordinator.call("POST", federation.path + "/start")
        for round, release in enumerate(RELEASES[1:], start=1):
            federation.wait_for_round(round)
            federation.coordinator.stop()
            federation.coordinator.start(installed[release])
        hashes["replaced", client] = federation.result()
        # An earlier release does not open what a later one has written.
        federation.coordinator.stop()
        refused = Process(federation.coordinator.module, tmp_path / "coordinator", *federation.coordinator.arguments)
        refused.start(installed[RELEASES[0]])
        assert refused.process.wait(PATIENCE) != 0
        assert "install the version that made it, or a later one" in refused.log()
    finally:
        federation.stop()
    assert len(set(hashes.values())) == 1, hashes


def test_a_spec_that_needs_a_later_client_is_refused_to_an_earlier_one(
    installed: dict[str, Path], tmp_path: Path
) -> None:
    federation = Federation(tmp_path, installed[CURRENT], loss={"kind": "mae"})
    early, late = federation.clients.values()
    try:
        early.start(installed["0.1.0"])
        late.start(installed["0.2.0"])
        assert early.process.wait(PATIENCE) not in (0, None)
        assert "pairs uses `loss`, which came with promptfed 0.2.0; this client is older" in early.log()
        wait_for(lambda: len(federation.get("/clients")["clients"]) == 1, PATIENCE, 0.2)
        [enrolled] = federation.get("/clients")["clients"]
        assert (enrolled["name"], enrolled["release"]) == ("south", "0.2.0")
    finally:
        federation.stop()
