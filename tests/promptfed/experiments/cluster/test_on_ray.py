"""With Ray itself: the same state for any number of crews and through kills, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.run_file import read_run
from promptfed.shared.service.reasons import Exit
from tests.support.ray_kills import KILLED, Kills, Nodes, below, killed, ray_nodes
from tests.support.waiting import PATIENCE, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RUN: dict[str, Any] = {
    "name": "small",
    "method": {"name": "fedpgp"},  # has private state
    "rounds": 2,
    "seed": 5,
    "training": {"learning_rate": 0.02, "batch_size": 4},
    "participation": {"min_clients": 2, "fraction": 0.6},
    "clients": {
        "count": 4,
        "name": "site-{index}",
        "data": "symbols:painting?topic=faces&per_class=4&test_per_class=2&partition=iid"
        "&clients={count}&client={index}",
    },
}
LONG = {**RUN, "rounds": 10_000, "evaluation": {"every": 10_000}}


@pytest.fixture(scope="module", autouse=True)
def _ray_is_installed() -> None:
    pytest.importorskip("ray", reason="crews on Ray: pip install '.[ray]'")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state of the simulation in one process."""
    torch.set_num_threads(1)
    run = read_run(written(tmp_path_factory.mktemp("simulated"), RUN))
    return simulate(run.spec, run.sites).state_hash


def written(folder: Path, run: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "promptfed", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def told(*arguments: object, code: int = 0) -> str:
    """What the command said: its output, or its errors where it is to fail."""
    running = started(*arguments)
    out, errors = running.communicate(timeout=4 * PATIENCE)
    assert running.returncode == code, errors
    return out if code == 0 else " ".join(errors.split())


def last_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.parametrize("crews", [1, 2, 4])
def test_the_state_is_that_of_one_process(crews: int, nodes: Nodes, wanted: str, tmp_path: Path) -> None:
    options = ["--engine", "ray", "--crews", crews, "--address", nodes.cluster.address]
    out = told("simulate", written(tmp_path, RUN), *options, "--storage", tmp_path / "storage", "--json")
    assert last_json(out)["state_hash"] == wanted


def test_a_sum_that_nobody_sees_is_that_of_one_process(nodes: Nodes, tmp_path: Path) -> None:
    run = {**RUN, "participation": {"min_clients": 4}, "secure_aggregation": {"threshold": 0.75}}
    path = written(tmp_path, run)
    torch.set_num_threads(1)
    simulated = read_run(path)
    options = ["--engine", "ray", "--crews", 2, "--address", nodes.cluster.address]
    out = told("simulate", path, *options, "--storage", tmp_path / "storage", "--json")
    assert last_json(out)["state_hash"] == simulate(simulated.spec, simulated.sites).state_hash


def test_a_run_whose_command_died_goes_on_from_its_storage(nodes: Nodes, wanted: str, tmp_path: Path) -> None:
    """As where the head node is lost: nothing of the command is stopped in order."""
    options = ["--engine", "ray", "--crews", 2, "--address", nodes.cluster.address, "--storage", tmp_path / "storage"]
    path = written(tmp_path, RUN)
    running = started("simulate", path, *options)
    database = tmp_path / "storage" / "coordinator"
    clients = tmp_path / "storage" / "clients"
    wait_for("enrolment", lambda: database.exists() and clients.exists() and len(list(clients.iterdir())) == 4)
    for one in [*below(running.pid), psutil.Process(running.pid)]:
        one.kill()
    running.communicate()
    again = last_json(told("simulate", path, *options, "--json"))
    assert again["state_hash"] == wanted
    other = told("simulate", written(tmp_path, {**RUN, "seed": 6}), *options, code=Exit.BAD_INPUT)
    assert "holds another run" in other


def test_killed_crews_nodes_and_coordinators_change_no_bit() -> None:
    """``PROMPTFED_RAY_KILLS=20,5,2,30``: so many crews, nodes and coordinators, in so many rounds."""
    crews, killed_nodes, coordinators, rounds = map(int, os.environ.get("PROMPTFED_RAY_KILLS", "2,1,1,8").split(","))
    run = {**KILLED, "rounds": rounds, "evaluation": {"every": rounds // 2}}
    kills = Kills(crews, killed_nodes, coordinators)
    found = killed(kills, 0, (2.0, 5.0), run)
    assert kills.done == {"crews": crews, "nodes": killed_nodes, "coordinators": coordinators}
    torch.set_num_threads(1)
    spec = {key: value for key, value in run.items() if key != "clients"}
    clients = run["clients"]
    from promptfed.runtime.processes import Site

    count = clients["count"]
    data = clients["data"].replace("{count}", str(count))
    sites = [Site(f"site-{k}", data.replace("{index}", str(k))) for k in range(count)]
    assert found["state_hash"] == simulate(spec, sites).state_hash


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(sent: signal.Signals, tmp_path: Path) -> None:
    """A Ray that was started for it, its crew, its coordinator, and the folders of all three."""
    os.environ["TMPDIR"] = str(tmp_path)
    try:
        running = started("simulate", written(tmp_path, LONG), "--engine", "ray")
    finally:
        del os.environ["TMPDIR"]

    def at_work() -> bool:
        assert running.poll() is None, running.communicate()
        return any(one.name().startswith("ray::CrewActor"[:15]) for one in below(running.pid)) and any(
            "promptfed.coordinator" in " ".join(one.cmdline()) for one in below(running.pid)
        )

    wait_for("a crew at work", at_work)
    time.sleep(2.0)  # into the middle of something, whatever it is
    below_it = below(running.pid)
    assert len(below_it) > 4
    running.send_signal(sent)
    _, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == Exit.INTERRUPTED, errors
    assert "promptfed: interrupted" in errors
    wait_for("the end of all", lambda: not [one for one in below_it if one.is_running() and one.status() != "zombie"])
    left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(("promptfed-", "pf-ray-"))]
    assert left == []


def test_a_cluster_that_is_too_small_is_told_with_what_it_has(nodes: Nodes, tmp_path: Path) -> None:
    options = ["--engine", "ray", "--address", nodes.cluster.address, "--storage", tmp_path / "storage"]
    path = written(tmp_path, {**RUN, "training": {"threads": 64}})
    said = told("simulate", path, *options, code=Exit.BAD_INPUT)
    assert "no room for 1 crew of 64 CPUs: it holds 0" in said
    said = told("simulate", written(tmp_path, RUN), *options, "--gpus-per-crew", 1, code=Exit.BAD_INPUT)
    assert "no room for 1 crew of 1 CPU and 1 GPU" in said
    assert "2 CPUs" in said
    said = told("simulate", written(tmp_path, RUN), *options[:4], code=Exit.BAD_INPUT)
    assert "give --storage FOLDER, one that all nodes see" in said
