"""A coordinator that starts again without the package of a federation's method."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.coordinator.aggregation import global_state
from promptfed.shared.methods import METHODS
from promptfed.testing.clients import PATIENCE, ScriptedClient, bearer, drive, spec
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import completed, launched
from tests.support.two_phase import TwoPhase


def test_its_federation_waits_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"}, rounds=1)
            other = coordinator.create(name="other")
            clients = coordinator.enrol(waits, "a", "b")
            coordinator.post(f"{waits}/start")
            coordinator.until(waits, state="running")
    with in_thread(tmp_path / "data") as coordinator:
        refused = coordinator.get(waits, status=503)
        assert refused["type"].endswith("/method-absent")
        assert "there is no method 'two_phase'" in refused["detail"]
        for client in clients:
            client.http = coordinator.http
            answer = client.task(0)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
            # And no more: why may hold the machine's paths.
            told = "waits cannot go on at this coordinator now: ask its operator"
            assert answer.json()["detail"] == told
        assert coordinator.get(other)["state"] == "enrolling"
        assert len(coordinator.get("/v1/federations")["federations"]) == 2
        coordinator.create(name="newcomer")
        elsewhere = coordinator.http.get(f"/v1/federations/{other}/task", headers=clients[0].headers)
        assert elsewhere.status_code == 404
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            for client in clients:
                client.http = coordinator.http
            tasks = coordinator.training(clients)
            assert [task["round"] for task in tasks] == [1, 1]
            assert coordinator.get(waits)["state"] == "running"


def test_it_can_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"})
    with in_thread(tmp_path / "data") as coordinator:
        coordinator.delete(f"/v1/federations/{waits}")
        assert coordinator.get("/v1/federations")["federations"] == []
        assert coordinator.get(waits, status=404)["type"].endswith("/not-found")


def test_a_constructor_that_raises_harms_no_other_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TwoPhase):
        def __init__(self, hyper: object):
            raise RuntimeError("not any more")

    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"})
    monkeypatch.setitem(METHODS, "two_phase", Broken)
    with in_thread(tmp_path / "data") as coordinator:
        assert "RuntimeError: not any more" in coordinator.get(waits, status=503)["detail"]
        coordinator.create(name="newcomer")


def test_torch_that_is_missing_pauses(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    call, missed = global_state.call, set()

    def missing_once(federation: Any, name: str, *arguments: Any) -> Any:
        if federation.name == "eyes" and federation.run.round == 2 and name not in missed:
            missed.add(name)
            raise global_state.NoTorch("there is no torch")
        return call(federation, name, *arguments)

    monkeypatch.setattr(global_state, "call", missing_once)
    hashes = []
    for name in ("ears", "eyes"):
        federation, clients = launched(coordinator, "a", "b", name=name, rounds=2)
        for pauses in range(1, 3 if name == "eyes" else 1):
            while coordinator.get(federation)["state"] != "paused":
                for client in clients:
                    client.work()
            assert (len(missed), coordinator.get(federation)["reason"]) == (pauses, "there is no torch; then resume")
            coordinator.post(f"{federation}/resume")
        drive(clients)
        coordinator.until(federation, state="finished")
        hashes.append(coordinator.get(f"{federation}/rounds/2")["state_hash"])
    assert missed == {"aggregate", "payload"}
    assert hashes[0] == hashes[1], "nothing is lost"


def test_a_replay_without_its_torch_says_what_to_do(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=1)

    def without_torch(federation: Any, name: str, *arguments: Any) -> Any:
        raise global_state.NoTorch(f"{name} needs torch: {global_state.GET_TORCH}")

    monkeypatch.setattr(global_state, "call", without_torch)
    answer = coordinator.post(f"{federation}/rounds/1/replay", {}, status=503)
    assert answer["type"].endswith("/method-absent")
    assert "coordinator-torch" in answer["detail"]


# A coordinator that serves a whole federation over HTTP without torch, even where torch is not installed.


HIDING = """
import atexit, sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "open_clip", "PIL", "sklearn"}:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

if sys.argv[1] == "hidden":
    sys.meta_path.insert(0, Hiding())
from promptfed.coordinator.__main__ import main

code = main(sys.argv[2:])
print("torch imported:", "torch" in sys.modules, flush=True)
sys.exit(code)
"""


@pytest.fixture(params=["hidden", "installed"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0", "--port-file", str(tmp_path / "url")]
    command, log = [sys.executable, "-c", HIDING, request.param, *options], (tmp_path / "log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.extended
def test_a_whole_federation_needs_no_torch(bare: subprocess.Popen[str], tmp_path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "url").exists():
        assert bare.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    operator = bearer((tmp_path / "data" / "operator.token").read_text().strip())
    with httpx.Client(base_url=(tmp_path / "url").read_text().strip(), timeout=PATIENCE) as http:
        settings = {"rule": "median", "server": {"optimizer": "adam", "learning_rate": 0.1}}
        for name, aggregation in (("eyes", {}), ("ears", settings)):
            made = http.post("/v1/federations", json=spec(name=name, aggregation=aggregation), headers=operator)
            assert made.status_code == 201, made.text
            token = http.post(f"/v1/federations/{name}/enrolment-tokens", json={"uses": 3}, headers=operator).json()
            clients = [ScriptedClient(http, name, one) for one in "abc"]
            for client in clients:
                assert client.enrol(token["token"]).status_code == 201
            assert http.post(f"/v1/federations/{name}/start", headers=operator).status_code == 200
            drive(clients)
            for path in ("", "/rounds", "/metrics", "/global-state", "/report"):
                answer = http.get(f"/v1/federations/{name}{path}", headers=operator)
                assert answer.status_code in (200, 404), (path, answer.text)
            replayed = http.post(f"/v1/federations/{name}/rounds/1/replay", json={}, headers=operator).json()
            assert [state["same"] for state in replayed["states"]] == [True]
    bare.terminate()
    output, _ = bare.communicate(timeout=PATIENCE)
    assert "torch imported: False" in output
