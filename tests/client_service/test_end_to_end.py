"""A federation of real processes over HTTP: a coordinator, two trainers and an evaluator; undisturbed and killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_service.exits import Exit
from shared.clip import tiny
from tests.client_service.processes import ClientProcess, wait_for

TRAINERS = {"north": "symbols:painting", "south": "symbols:cartoon"}
EVALUATOR = ("lab", "symbols:sketch")
SIZE = "?topic={topic}&per_class=2&test_per_class=1"
ROUNDS = 2
PATIENCE = 240.0  # seconds that a busy machine may take for what else takes ten

pytestmark = pytest.mark.timeout(900)


def data(domain: str) -> str:
    """Few images of few classes."""
    from shared.data.classes import TOPICS

    return domain + SIZE.format(topic=sorted(TOPICS)[0])


@dataclass
class Coordinator:
    """A coordinator process and its operator's view of it."""

    url: str
    token: str

    def call(self, verb: str, path: str, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} | request.pop("headers", {})
        answer = httpx.request(verb, self.url + path, headers=headers, timeout=60, trust_env=False, **request)
        assert answer.is_success, answer.text
        return answer

    def get(self, path: str) -> Any:
        return self.call("GET", path).json()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    port_file = folder / "url"
    with (folder / "log").open("wb") as log:
        command = ["-m", "coordinator", f"--data-dir={folder / 'data'}", "--port=0", f"--port-file={port_file}"]
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        wait_for(lambda: port_file.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield Coordinator(port_file.read_text().strip(), (folder / "data" / "operator.token").read_text().strip())
    finally:
        process.terminate()
        try:
            assert process.wait(60) == 0, (folder / "log").read_text()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


class Federation:
    """A federation with its client processes."""

    def __init__(self, coordinator: Coordinator, name: str, folder: Path, features: Path):
        self.coordinator, self.folder = coordinator, folder
        spec = {
            "name": name,
            "method": {"name": "promptfl", "m": 4},
            "backbone": {
                "model": tiny.MODEL,
                "pretrained": tiny.PRETRAINED if tiny.weights_path().exists() else "random",
            },
            "rounds": ROUNDS,
            "training": {"epochs": 12, "batch_size": 4, "learning_rate": 0.02},
            "participation": {"min_clients": len(TRAINERS), "deadline_seconds": 300.0},
            "start": "manual",
            "seed": 3,
        }
        self.path = "/v1/federations/" + coordinator.call("POST", "/v1/federations", json=spec).json()["id"]
        minted = coordinator.call("POST", self.path + "/enrolment-tokens").json()
        folder.mkdir()
        (folder / "token").write_text(minted["token"])
        sites = [(client, "trainer", uri) for client, uri in TRAINERS.items()] + [
            (EVALUATOR[0], "evaluator", EVALUATOR[1])
        ]
        self.clients = {
            client: ClientProcess(
                folder / client,
                coordinator=coordinator.url,
                federation=name,
                enrolment_token_file=str(folder / "token"),
                name=client,
                role=role,
                data=data(uri),
                feature_cache=str(features),
            )
            for client, role, uri in sites
        }

    def start(self) -> None:
        """Start once all have enrolled."""
        wait_for(lambda: self.died() or len(self.get("/clients")["clients"]) == len(self.clients), PATIENCE, 0.1)
        assert not self.died(), self.logs()
        self.coordinator.call("POST", self.path + "/start")

    def end(self) -> dict[str, Any]:
        """The final view, when all clients have gone home."""
        deadline = time.monotonic() + PATIENCE
        for client in self.clients.values():
            assert client.wait(max(1.0, deadline - time.monotonic())) == Exit.OK, self.logs()
        found: dict[str, Any] = self.get("")
        return found

    def get(self, path: str) -> Any:
        return self.coordinator.get(self.path + path)

    def died(self) -> bool:
        return any(client.process.poll() is not None for client in self.clients.values())

    def logs(self) -> str:
        return "\n\n".join(f"{name}:\n{client.text()}" for name, client in self.clients.items())

    def stop(self) -> None:
        for client in self.clients.values():
            client.stop()


@pytest.fixture(scope="module")
def undisturbed(
    coordinator: Coordinator, features: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Federation, dict[str, Any]]]:
    federation = Federation(coordinator, "undisturbed", tmp_path_factory.mktemp("runs") / "undisturbed", features)
    try:
        federation.start()
        yield federation, federation.end()
    finally:
        federation.stop()


def test_it_runs_from_enrolment_to_the_last_evaluation(undisturbed: tuple[Federation, dict[str, Any]]) -> None:
    federation, final = undisturbed
    assert final["state"] == "finished", final["reason"]
    assert final["round"] == ROUNDS
    reports = [federation.get(f"/rounds/{round}") for round in range(ROUNDS + 1)]
    assert len({report["state_hash"] for report in reports}) == ROUNDS + 1
    for report in reports[1:]:
        (phase,) = report["phases"]
        assert [counted["client"] for counted in phase["counted"]] == ["north", "south"]
        assert {"loss", "train_seconds"} <= set(phase["updates"][0]["metrics"])
        assert phase["failed"] == phase["expired"] == []
    for report in reports:
        found = report["evaluation"]["clients"]
        assert set(found) == {"north", "south", "lab"}
        for client in found.values():
            assert set(client["splits"]) == set(client["zero_shot"]) == {"test"}
    assert {client["zero_shot"]["test"]["accuracy"] for client in [r["evaluation"]["clients"]["lab"] for r in reports]}
    assert "Traceback" not in federation.logs()


def test_a_client_killed_in_training_leads_to_the_same_state(
    coordinator: Coordinator, features: Path, undisturbed: tuple[Federation, dict[str, Any]], tmp_path: Path
) -> None:
    federation = Federation(coordinator, "killed", tmp_path / "killed", features)
    try:
        federation.start()
        victim = federation.clients["north"]
        wait_for(lambda: victim.stage() == "training", PATIENCE, 0.005)
        victim.kill()
        assert federation.get("")["round"] == 1
        secret = (victim.state_dir / "identity.json").read_text()
        victim.start()
        final = federation.end()
    finally:
        federation.stop()
    assert final["state"] == "finished", final["reason"]
    assert final["state_hash"] == undisturbed[1]["state_hash"]
    assert (victim.state_dir / "identity.json").read_text() == secret
    evaluations = [run.get(f"/rounds/{ROUNDS}")["evaluation"]["clients"] for run in (federation, undisturbed[0])]
    results = [{name: client["splits"] for name, client in found.items()} for found in evaluations]
    assert results[0] == results[1]
