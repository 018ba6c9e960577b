"""A coordinator that serves a whole federation over HTTP without torch, even where torch is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from promptfed.testing.clients import PATIENCE, ScriptedClient, bearer, drive, spec

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
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0", "--port-file", str(tmp_path / "url")]
    process = subprocess.Popen(
        [sys.executable, "-c", HIDING, request.param, *options],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
        env=os.environ,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.extended
def test_a_whole_federation_needs_no_torch(coordinator: subprocess.Popen[str], tmp_path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "url").exists():
        assert coordinator.poll() is None, (tmp_path / "log").read_text()
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
    coordinator.terminate()
    output, _ = coordinator.communicate(timeout=PATIENCE)
    assert "torch imported: False" in output
