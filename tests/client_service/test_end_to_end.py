"""A federation over HTTP with a real coordinator process, two trainers and an evaluator.

Once with all clients in this process, undisturbed, and once in processes of their own, one killed: the same state.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.exits import Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.durable_files import TRAINING_POINT, VARIABLE
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import load_backbone, tiny
from tests.support.client_processes import ClientProcess
from tests.support.waiting import PATIENCE, wait_for

TRAINERS = {"north": "symbols:painting", "south": "symbols:cartoon"}
EVALUATOR = ("lab", "symbols:sketch")
SIZE = "?topic={topic}&per_class=2&test_per_class=1"
ROUNDS = 2

pytestmark = pytest.mark.timeout(1800)


def data(domain: str) -> str:
    """Few images of few classes."""
    from promptfed.shared.data.classes import TOPICS

    return domain + SIZE.format(topic=sorted(TOPICS)[0])


@dataclass
class Coordinator:
    """A coordinator process and its operator's view of it."""

    url: str
    token: str

    def call(self, verb: str, path: str, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"} | request.pop("headers", {})
        answer = httpx.request(verb, self.url + path, headers=headers, timeout=PATIENCE, trust_env=False, **request)
        assert answer.is_success, answer.text
        return answer

    def get(self, path: str) -> Any:
        return self.call("GET", path).json()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    port_file = folder / "url"
    with (folder / "log").open("wb") as log:
        command = [
            "-m", "promptfed.coordinator", f"--data-dir={folder / 'data'}", "--port=0", f"--port-file={port_file}",
        ]  # fmt: skip
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        wait_for("the port", lambda: port_file.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield Coordinator(port_file.read_text().strip(), (folder / "data" / "operator.token").read_text().strip())
    finally:
        process.terminate()
        try:
            assert process.wait(PATIENCE) == 0, (folder / "log").read_text()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


class Federation:
    """A federation of a real coordinator, and what its clients are started with."""

    def __init__(self, coordinator: Coordinator, name: str, folder: Path, features: Path):
        self.coordinator = coordinator
        self.folder = folder
        folder.mkdir()
        spec = {
            "name": name, "method": {"name": "promptfl", "m": 4}, "rounds": ROUNDS,
            "training": {"epochs": 12, "batch_size": 4, "learning_rate": 0.02},
            "participation": {"min_clients": len(TRAINERS), "deadline_seconds": 300.0}, "seed": 3,
        }  # fmt: skip
        self.path = "/v1/federations/" + coordinator.call("POST", "/v1/federations", json=spec).json()["id"]
        minted = coordinator.call("POST", self.path + "/enrolment-tokens", json={"uses": 4}).json()
        (folder / "token").write_text(minted["token"])
        common = {
            "coordinator": coordinator.url, "federation": name, "enrolment_token_file": str(folder / "token"),
            "feature_cache": str(features),
        }  # fmt: skip
        sites = [*((site, "trainer", uri) for site, uri in TRAINERS.items()), (EVALUATOR[0], "evaluator", EVALUATOR[1])]
        self.options = {site: common | {"name": site, "role": role, "data": data(uri)} for site, role, uri in sites}

    def get(self, path: str) -> Any:
        return self.coordinator.get(self.path + path)

    def all_enrolled(self) -> bool:
        return len(self.get("/clients")["clients"]) == len(self.options)

    def start(self) -> None:
        self.coordinator.call("POST", self.path + "/start")


@pytest.fixture(scope="module")
def undisturbed(coordinator: Coordinator, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """The same federation with its clients in this process, sharing a thread and a backbone."""
    federation = Federation(coordinator, "undisturbed", tmp_path_factory.mktemp("runs") / "undisturbed", features)
    weights = load_backbone(tiny.MODEL, tiny.PRETRAINED)

    async def run() -> list[Exit]:
        with ThreadPoolExecutor(1) as executor:
            workers = [
                Worker(
                    make_settings(state_dir=federation.folder / site, device="cpu", **options),
                    Parts(backbone=weights),
                    executor=executor,
                )
                for site, options in federation.options.items()
            ]
            running = [asyncio.ensure_future(worker.run()) for worker in workers]
            await asyncio.to_thread(wait_for, federation.all_enrolled, PATIENCE, 0.1)
            await asyncio.to_thread(federation.start)
            return await asyncio.gather(*running)

    assert set(asyncio.run(run())) == {Exit.OK}
    return federation


def test_it_runs_from_enrolment_to_the_last_evaluation(undisturbed: Federation) -> None:
    final = undisturbed.get("")
    assert final["state"] == "finished", final["reason"]
    assert final["round"] == ROUNDS
    reports = [undisturbed.get(f"/rounds/{round}") for round in range(ROUNDS + 1)]
    assert len({report["state_hash"] for report in reports}) == ROUNDS + 1
    for report in reports[1:]:
        (phase,) = report["phases"]
        assert [counted["client"] for counted in phase["counted"]] == ["north", "south"]
        assert {"loss", "train_seconds"} <= set(phase["updates"][0]["metrics"])
        assert phase["failed"] == phase["expired"] == []
    zero_shot = []
    for report in reports:
        found = report["evaluation"]["clients"]
        assert set(found) == {"north", "south", "lab"}
        assert all(set(client["splits"]) == set(client["zero_shot"]) == {"test"} for client in found.values())
        zero_shot.append({name: client["zero_shot"] for name, client in found.items()})
    assert zero_shot[0] == zero_shot[1] == zero_shot[2]


def test_many_processes_one_of_them_killed_in_training_reach_the_same_state(
    coordinator: Coordinator, features: Path, undisturbed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(coordinator, "killed", tmp_path / "killed", features)
    clients = {}
    for site, options in federation.options.items():
        with monkeypatch.context() as patch:
            if site == "north":
                patch.setenv(VARIABLE, f"{TRAINING_POINT}:3")
            clients[site] = ClientProcess(tmp_path / site, **options)

    def logs() -> str:
        return "\n\n".join(f"{site}:\n{client.text()}" for site, client in clients.items())

    def died() -> bool:
        return any(client.process.poll() is not None for client in clients.values())

    try:
        wait_for("enrolment", lambda: died() or federation.all_enrolled(), every=0.1)
        assert not died(), logs()
        federation.start()
        victim = clients["north"]
        assert victim.wait(PATIENCE) == -signal.SIGKILL, logs()
        assert federation.get("")["round"] == 1
        identity = (victim.state_dir / "identity.json").read_text()
        victim.start()
        for client in clients.values():
            assert client.wait(PATIENCE) == Exit.OK, logs()
    finally:
        for client in clients.values():
            client.stop()

    final = federation.get("")
    assert final["state"] == "finished", final["reason"]
    assert final["state_hash"] == undisturbed.get("")["state_hash"]
    assert (victim.state_dir / "identity.json").read_text() == identity
    results = [
        {name: client["splits"] for name, client in run.get(f"/rounds/{ROUNDS}")["evaluation"]["clients"].items()}
        for run in (federation, undisturbed)
    ]
    assert results[0] == results[1]
    assert "Traceback" not in logs()
