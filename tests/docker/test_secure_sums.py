"""Secure sums in containers: the spec posted with curl, three clients, the coordinator killed on the way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.docker.conftest import Project, wait_for

CLIENTS = ("architect", "doodler", "signmaker")
SPEC: dict[str, Any] = {
    "name": "summed",
    "method": {"name": "promptfl", "m": 4},
    "backbone": {"model": "promptfed-tiny"},
    "rounds": 2,
    "training": {"epochs": 1, "batch_size": 64, "learning_rate": 0.05},
    "participation": {"min_clients": 3},
    "secure_aggregation": {},
    "start": "when_ready",
}


def curl(project: Project, token: str, *arguments: str) -> dict[str, Any]:
    address = f"http://127.0.0.1:{project.port}/v1/federations{arguments[0]}"
    command = ["curl", "-sSf", "-H", f"Authorization: Bearer {token}", address, *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_three_sites_sum_what_nobody_sees(projects: Callable[..., Project], tmp_path: Path) -> None:
    other = {"services": {name: {"environment": {"PROMPTFED_CLIENT_FEDERATION": "summed"}} for name in CLIENTS}}
    path = tmp_path / "summed.yml"
    path.write_text(yaml.safe_dump(other))
    project = projects(path)
    project.compose("up", "--detach", "--wait", "coordinator")
    token = project.compose("exec", "-T", "coordinator", "cat", "/data/operator.token").stdout.strip()
    body = ("-H", "Content-Type: application/json", "-d")
    federation = curl(project, token, "", *body, json.dumps(SPEC))["id"]
    minted = curl(project, token, f"/{federation}/enrolment-tokens", *body, json.dumps({"uses": 3}))["token"]
    write = f"printf %s {minted} > /join/enrolment.token"  # in the place of that for the compose file's own federation
    project.compose("exec", "-T", "coordinator", "sh", "-c", write)
    project.compose("up", "--detach", *CLIENTS)
    wait_for("the first sum", lambda: curl(project, token, f"/{federation}")["round"] >= 1)
    project.compose("kill", "coordinator")
    project.compose("up", "--detach", "--wait", "coordinator")
    wait_for("the end", lambda: curl(project, token, f"/{federation}")["state"] == "finished")
    rounds = curl(project, token, f"/{federation}/rounds")["rounds"]
    for report in rounds[1:]:
        phase = report["phases"][-1]
        assert phase["updates"] == []
        assert phase["secure"]["sum_clients"] == 3
        assert all(one["withheld"] for one in report["evaluation"]["clients"].values())
    wait_for(
        "the clients' end", lambda: all(project.containers()[name]["State"]["Status"] == "exited" for name in CLIENTS)
    )
    logs = project.compose("logs", "architect").stdout
    assert "2 of the 2 others in the secure sum are new to this client" in logs
