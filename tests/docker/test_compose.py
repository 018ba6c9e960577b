"""The compose federation, run to its end with its coordinator killed on the way; and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load

from tests import ROOT
from tests.docker.conftest import Project, docker, wait_for

CLIENTS = ("architect", "doodler", "signmaker", "sketchbook")
FEDERATION = "/v1/federations/symbols"


@dataclass
class Finished:
    """A federation that has ended, and what there was to see."""

    project: Project
    killed_in_round: int
    secrets: dict[str, str]
    federation: dict[str, Any]
    rounds: list[dict[str, Any]]
    prompts: bytes
    logs: dict[str, str]


@pytest.fixture(scope="module")
def finished(projects: Callable[..., Project]) -> Finished:
    project = projects()
    project.compose("up", "--detach")
    operator = project.operator()

    def now() -> dict[str, Any]:
        return operator.get(FEDERATION).raise_for_status().json()

    wait_for("the first round", lambda: now()["round"] >= 2)
    token = project.compose("exec", "-T", "coordinator", "cat", "/join/enrolment.token").stdout.strip()
    project.compose("kill", "coordinator")
    project.compose("up", "--detach")
    # The killed container's own token is good for the one that goes on.
    after_kill = wait_for("the coordinator's return", now)
    federation = wait_for("the end", lambda: (found := now())["state"] == "finished" and found)
    wait_for(
        "the clients' end", lambda: all(project.containers()[name]["State"]["Status"] == "exited" for name in CLIENTS)
    )
    binary = {"Accept": "application/octet-stream"}
    return Finished(
        project,
        after_kill["round"],
        {"operator": operator.headers["Authorization"].removeprefix("Bearer "), "enrolment": token},
        federation,
        operator.get(f"{FEDERATION}/rounds").raise_for_status().json()["rounds"],
        operator.get(f"{FEDERATION}/prompts", headers=binary).raise_for_status().content,
        {name: project.compose("logs", "--no-log-prefix", name).stdout for name in ("coordinator", *CLIENTS)},
    )


def test_it_goes_on_after_a_kill_and_ends(finished: Finished) -> None:
    spec = yaml.safe_load((ROOT / "deploy" / "federation.yaml").read_text())
    assert 2 <= finished.killed_in_round <= spec["rounds"], "the kill came too late to show anything"
    assert finished.federation["round"] == spec["rounds"]
    trainers = ["architect", "doodler", "signmaker"]
    counted = [[update["client"] for update in report["phases"][0]["updates"]] for report in finished.rounds[1:]]
    assert counted == [trainers] * spec["rounds"]
    assert {name: one["State"]["ExitCode"] for name, one in finished.project.containers().items()} == {
        **dict.fromkeys(CLIENTS, 0),
        "coordinator": 0,
    }
    assert set(load(finished.prompts)) == {"context"}


def test_every_site_gains_the_unseen_one_too(finished: Finished) -> None:
    last = finished.rounds[-1]["evaluation"]["clients"]
    assert set(last) == set(CLIENTS)
    for name, one in last.items():
        assert one["splits"]["test"]["accuracy"] > one["zero_shot"]["test"]["accuracy"], name


def test_the_result_is_that_of_processes(finished: Finished, tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "deploy" / "federation.yaml").read_text())
    sites = []
    for name in CLIENTS:
        given = dict(
            option.removeprefix("--").split("=", 1) for option in finished.project.containers()[name]["Args"][2:]
        )
        sites.append({"name": given["name"], "data": given["data"], "role": given.get("role", "trainer")})
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(spec | {"clients": sites}))
    command = [sys.executable, "-m", "promptfed", "launch", str(run), "--gpus", "none", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state_hash"] == finished.federation["state_hash"]


def test_no_token_is_seen_from_outside(finished: Finished) -> None:
    seen = json.dumps(finished.project.containers()) + json.dumps(finished.logs)
    for image in ("promptfed-coordinator", "promptfed-client"):
        seen += docker("inspect", image).stdout + docker("history", "--no-trunc", image).stdout
    for kind, secret in finished.secrets.items():
        assert len(secret) >= 32
        assert secret not in seen, f"the {kind} token can be read without the volume"


def test_containers_can_do_little(finished: Finished) -> None:
    script = (
        "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status; touch /app/x /tmp/x; ls /join; echo >> /join/x && echo w"
    )
    inside = finished.project.compose("exec", "-T", "coordinator", "sh", "-c", script, check=False)
    assert inside.stdout.split() == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "enrolment.token", "w"]
    assert "/app/x': Read-only file system" in inside.stderr
    assert "/tmp/x" not in inside.stderr
    client = finished.project.compose(
        "run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "architect", "-c", script, check=False
    )
    assert client.stdout.split() == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "enrolment.token", "x"]
    assert "/join/x: Read-only file system" in client.stderr
    for name, one in finished.project.containers().items():
        networks = {found.removeprefix(f"{finished.project.name}_") for found in one["NetworkSettings"]["Networks"]}
        assert networks == ({"federation", "published"} if name == "coordinator" else {"federation"})
    network = json.loads(docker("network", "inspect", f"{finished.project.name}_federation").stdout)
    assert network[0]["Internal"] is True


def test_a_change_of_code_installs_nothing_again(images: None, tmp_path: Path) -> None:
    context = tmp_path / "context"
    for name in ("requirements", "shared", "coordinator", "client_service"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    (context / "promptfed").mkdir()
    for name in ("Dockerfile", ".dockerignore", "constraints.txt", "promptfed/__init__.py"):
        shutil.copy2(ROOT / name, context / name)
    for service in ("coordinator", "client_service"):
        (context / service / "__init__.py").write_text(f'"""Changed {tmp_path}."""\n')  # as in no build before
    for target, copied, lists in (("coordinator", "coordinator", 2), ("client", "client_service", 3)):
        tag = f"promptfed-test-changed-{target}"
        built = docker("build", "--progress=plain", "--target", target, "--tag", tag, str(context))
        docker("image", "rm", tag)
        assert built.returncode == 0, built.stderr
        steps = [part.splitlines() for part in built.stderr.split("\n\n")]
        installs = [lines for lines in steps if "RUN" in lines[0] and " install-locked " in lines[0]]
        assert len(installs) == lists
        assert all(lines[1].endswith("CACHED") for lines in installs), installs
        assert not any(
            lines[-1].endswith("CACHED") for lines in steps if f"COPY {copied} promptfed/{copied}" in lines[0]
        )


def test_the_coordinator_is_small_and_has_no_torch(images: None) -> None:
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "promptfed-coordinator").stdout) <= 500_000_000
    script = "import importlib.util as u; print(*(name for name in ('torch', 'PIL', 'scipy') if u.find_spec(name)))"
    entry = ["--rm", "--entrypoint", "python", "promptfed-coordinator"]
    assert docker("run", *entry, "-c", script).stdout.split() == ["scipy"]


def test_the_target_with_torch_is_chosen_by_a_variable(engine: None) -> None:
    def target(**variables: str) -> str:
        services = json.loads(Project().compose("config", "--format", "json", **variables).stdout)["services"]
        return str(services["coordinator"]["build"]["target"])

    assert target() == "coordinator"
    chosen = target(PROMPTFED_COORDINATOR_TARGET="coordinator-torch")
    assert f"FROM torch AS {chosen}\n" in (ROOT / "Dockerfile").read_text()


def without_the_token(tmp_path: Path, service: str, volumes: list[str]) -> Path:
    listed = "".join(f"\n      - {volume}" for volume in volumes)
    path = tmp_path / "without.yml"
    path.write_text(f"services:\n  {service}:\n    restart: 'no'\n    volumes: !override{listed}\n")
    return path


def test_a_coordinator_without_the_token_volume(projects: Callable[..., Project], tmp_path: Path) -> None:
    volumes = ["./deploy/federation.yaml:/federation.yaml:ro", "coordinator:/data"]
    project = projects(without_the_token(tmp_path, "coordinator", volumes))
    project.compose("up", "--detach", "--no-deps", "coordinator")
    state = wait_for(
        "its end", lambda: (found := project.containers()["coordinator"]["State"])["Status"] == "exited" and found
    )
    assert state["ExitCode"] == 2
    (said,) = project.compose("logs", "--no-log-prefix", "--no-color", "coordinator").stdout.strip().splitlines()
    assert "cannot write the enrolment token into /join" in said
    assert "mount the volume" in said


def test_a_client_without_the_token_volume(projects: Callable[..., Project], tmp_path: Path) -> None:
    project = projects(without_the_token(tmp_path, "architect", ["architect:/state"]))
    project.compose("up", "--detach", "architect")
    state = wait_for(
        "its end", lambda: (found := project.containers()["architect"]["State"])["Status"] == "exited" and found
    )
    assert state["ExitCode"] == 5
    said = project.compose("logs", "--no-log-prefix", "--no-color", "architect").stdout.strip().splitlines()
    assert "cannot read the enrolment token in /join/enrolment.token" in said[-1]
    assert "mount the volume" in said[-1]


def test_the_gpu_variant_is_accepted(engine: None) -> None:
    project = Project()
    index = {"PROMPTFED_EXTRA_INDEX_URL": "https://wheels.invalid/cpu"}
    plain = json.loads(project.compose("config", "--format", "json").stdout)["services"]
    wheels = json.loads(project.compose("config", "--format", "json", **index).stdout)["services"]
    project.files.append(ROOT / "docker-compose.gpu.yml")
    gpu = json.loads(project.compose("config", "--format", "json", **index).stdout)["services"]
    for name in CLIENTS:
        (device,) = gpu[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]
        assert gpu[name]["environment"]["PROMPTFED_CLIENT_DEVICE"] == "cuda"
        assert plain[name]["environment"]["PROMPTFED_CLIENT_DEVICE"] == "cpu"
        assert "deploy" not in plain[name]
    assert "deploy" not in gpu["coordinator"]

    def index_of(services: dict[str, Any], name: str) -> str:
        return str(services[name]["build"]["args"]["PIP_EXTRA_INDEX_URL"])

    both = ("coordinator", "architect")
    assert [index_of(plain, name) for name in both] == ["", ""]
    assert [index_of(wheels, name) for name in both] == list(index.values()) * 2
    assert [index_of(gpu, name) for name in both] == [*index.values(), ""], "CPU wheels on a GPU"


def test_the_documented_override_is_accepted(engine: None, tmp_path: Path) -> None:
    (block,) = [part for part in documented("yaml") if part.startswith("services:")]
    override = tmp_path / "override.yml"
    override.write_text(block)
    project = Project()
    project.files.append(override)
    client = json.loads(project.compose("config", "--format", "json").stdout)["services"]["architect"]
    mounted = {one["target"]: (one["source"], one.get("read_only", False)) for one in client["volumes"]}
    assert mounted == {"/join": ("join", True), "/state": ("architect", False), "/images": ("/srv/pets", True)}
    assert client["command"] == ["--name=architect", "--data=folder:/images"]


def documented(kind: str) -> list[str]:
    """The blocks of one kind in docs/guides/containers.md."""
    text = (ROOT / "docs" / "guides" / "containers.md").read_text()
    return [part.split("```")[0] for part in text.split(f"```{kind}\n")[1:]]
