"""`promptfed launch --runtime docker` with a real engine: the result of processes, deaths, nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from promptfed.shared.service.reasons import Exit
from tests.docker.conftest import docker, wait_for

TINY = {"backbone": {"model": "promptfed-tiny"}}
SPEC = """
name: tiny
method: {name: promptfl}
rounds: ROUNDS
participation: {min_clients: 2}
evaluation: {every: 100}
clients:
  - {name: a, data: "symbols:neon?per_class=2&test_per_class=2"}
  - {name: b, data: "symbols:quickdraw?per_class=2&test_per_class=2"}
  - {name: referee, data: "symbols:sketch?test_per_class=2", role: evaluator}
"""


def launch(path: Path, spec: str, *options: str) -> subprocess.Popen[str]:
    path.write_text(spec)
    command = [sys.executable, "-m", "promptfed", "launch", str(path), "--gpus", "none", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def spec_of(rounds: int) -> str:
    return SPEC.replace("ROUNDS", str(rounds))


def ours() -> list[str]:
    """Everything that any launch has made and not removed; containers come first."""
    mine = ["--filter", "label=promptfed.launch", "--format", "{{.Names}}"]
    found = docker("ps", "--all", *mine).stdout.split()
    mine[-1] = "{{.Name}}"
    return found + docker("network", "ls", *mine).stdout.split() + docker("volume", "ls", *mine).stdout.split()


@pytest.fixture(autouse=True)
def nothing_is_there(images: None) -> None:
    assert ours() == [], "an earlier launch left something"


def test_containers_die_and_the_result_is_that_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    launched = launch(path, spec_of(25), "--runtime", "docker", "--json", "--keep", str(tmp_path / "logs"))
    try:
        name = wait_for("a client's start", lambda: [one for one in ours() if one.endswith("-client-a")])[0]
        wait_for("a first update", lambda: "has the update" in docker("logs", name).stderr)
        assert docker("kill", name).returncode == 0
        assert docker("kill", name.replace("client-a", "coordinator")).returncode == 0
        out, errors = launched.communicate(timeout=400)
    finally:
        launched.kill()
    assert launched.returncode == Exit.OK, errors
    contained = json.loads(out)
    assert "has the update" in (tmp_path / "logs" / "client-a.log").read_text()
    assert ours() == []
    in_processes = launch(path, spec_of(25), "--json")
    out, errors = in_processes.communicate(timeout=400)
    assert in_processes.returncode == Exit.OK, errors
    plain = json.loads(out)
    assert (contained["runtime"], plain["runtime"]) == ("docker", "process")
    for key in ("state_hash", "federated", "zero_shot"):
        assert contained[key] == plain[key], key
    # An update's header tells in text how long its training took, and is filled up to whole words of 8 bytes.
    assert abs(contained["bytes_up"] - plain["bytes_up"]) <= 8 * 25 * 2  # of two trainers


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_everything_away(sent: int, tmp_path: Path) -> None:
    theirs = docker("volume", "create", "promptfed-test-of-somebody").stdout.strip()
    launched = launch(tmp_path / "tiny.yaml", spec_of(1000), "--runtime", "docker")
    try:
        wait_for("the start of all", lambda: len([one for one in ours() if "-client-" in one]) >= 6)
        launched.send_signal(sent)
        launched.communicate(timeout=60)
        assert launched.returncode == Exit.INTERRUPTED
        assert ours() == []
        assert docker("volume", "rm", theirs).returncode == 0, "a volume of somebody else's was removed"
    finally:
        launched.kill()


def test_images_of_ones_own(tmp_path: Path) -> None:
    for site in ("left", "right"):
        for shade, name in ((0, "dark"), (255, "light")):
            folder = tmp_path / site / name
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (32, 32), (abs(shade - 3 * number),) * 3).save(folder / f"{number}.png")
    sites = [{"name": site, "data": f"folder:{tmp_path / site}"} for site in ("left", "right")]
    spec = json.dumps({"name": "own", "method": {"name": "promptfl"}, "rounds": 1, "clients": sites} | TINY)
    launched = launch(tmp_path / "own.yaml", spec, "--runtime", "docker", "--json")
    out, errors = launched.communicate(timeout=300)
    assert launched.returncode == Exit.OK, errors
    assert set(json.loads(out)["federated"]) == {"client:left", "client:right"}
    assert ours() == []
