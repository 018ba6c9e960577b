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
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.cluster import connection
from promptfed.experiments.cluster.connection import import_ray
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.run_file import read_run
from promptfed.shared.service.reasons import Exit
from tests.support.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.timeout(3600)

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}
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
def cluster() -> Iterator[Any]:
    """A head without a place for crews, and two nodes beside it."""
    from ray.cluster_utils import Cluster

    head = {**NODE, "num_cpus": 0, "include_dashboard": False}
    made = connection.started(lambda: Cluster(initialize_head=True, head_node_args=head), import_ray().shutdown)
    try:
        for _ in range(2):
            connection.started(lambda: made.add_node(**NODE), lambda: None)
        yield made
    finally:
        made.shutdown()


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


def below(running: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(running.pid).children(recursive=True)


def last_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.door
def test_a_ray_of_its_own_comes_to_the_state_of_one_process(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is run in this process, which has imported torch, and Ray keeps no process for what may come."""
    for name, value in {"OMP_NUM_THREADS": "1", "RAY_enable_worker_prestart": "0"}.items():
        monkeypatch.setenv(name, value)
    options = ["--engine", "ray", "--crews", "1", "--storage", str(tmp_path / "storage"), "--json"]
    done = CliRunner().invoke(app, ["simulate", str(written(tmp_path, RUN)), *options])
    assert last_json(done.stdout)["state_hash"] == wanted, done.output


@pytest.mark.slow
@pytest.mark.parametrize("crews", [1, 2, 4])
def test_the_state_is_that_of_one_process(crews: int, cluster: Any, wanted: str, tmp_path: Path) -> None:
    options = ["--engine", "ray", "--crews", crews, "--address", cluster.address]
    out = told("simulate", written(tmp_path, RUN), *options, "--storage", tmp_path / "storage", "--json")
    assert last_json(out)["state_hash"] == wanted


@pytest.mark.slow
def test_a_sum_that_nobody_sees_is_that_of_one_process(cluster: Any, tmp_path: Path) -> None:
    run = {**RUN, "participation": {"min_clients": 4}, "secure_aggregation": {"threshold": 0.75}}
    path = written(tmp_path, run)
    torch.set_num_threads(1)
    simulated = read_run(path)
    options = ["--engine", "ray", "--crews", 2, "--address", cluster.address]
    out = told("simulate", path, *options, "--storage", tmp_path / "storage", "--json")
    assert last_json(out)["state_hash"] == simulate(simulated.spec, simulated.sites).state_hash


@pytest.mark.slow
def test_a_run_whose_command_died_goes_on_from_its_storage(cluster: Any, wanted: str, tmp_path: Path) -> None:
    """As where the head node is lost: nothing of the command is stopped in order."""
    options = ["--engine", "ray", "--crews", 2, "--address", cluster.address, "--storage", tmp_path / "storage"]
    path = written(tmp_path, RUN)
    running = started("simulate", path, *options)
    database = tmp_path / "storage" / "coordinator"
    clients = tmp_path / "storage" / "clients"
    wait_for("enrolment", lambda: database.exists() and clients.exists() and len(list(clients.iterdir())) == 4)
    for one in [*below(running), psutil.Process(running.pid)]:
        one.kill()
    running.communicate()
    again = last_json(told("simulate", path, *options, "--json"))
    assert again["state_hash"] == wanted
    other = told("simulate", written(tmp_path, {**RUN, "seed": 6}), *options, code=Exit.BAD_INPUT)
    assert "holds another run" in other


@pytest.mark.slow
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
        return any(one.name().startswith("ray::CrewActor"[:15]) for one in below(running)) and any(
            "promptfed.coordinator" in " ".join(one.cmdline()) for one in below(running)
        )

    wait_for("a crew at work", at_work)
    time.sleep(2.0)  # into the middle of something, whatever it is
    below_it = below(running)
    assert len(below_it) > 4
    running.send_signal(sent)
    _, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == Exit.INTERRUPTED, errors
    assert "promptfed: interrupted" in errors
    wait_for("the end of all", lambda: not [one for one in below_it if one.is_running() and one.status() != "zombie"])
    left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(("promptfed-", "pf-ray-"))]
    assert left == []


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_told_with_what_it_has(cluster: Any, tmp_path: Path) -> None:
    options = ["--engine", "ray", "--address", cluster.address, "--storage", tmp_path / "storage"]
    path = written(tmp_path, {**RUN, "training": {"threads": 64}})
    said = told("simulate", path, *options, code=Exit.BAD_INPUT)
    assert "no room for 1 crew of 64 CPUs: it holds 0" in said
    said = told("simulate", written(tmp_path, RUN), *options, "--gpus-per-crew", 1, code=Exit.BAD_INPUT)
    assert "no room for 1 crew of 1 CPU and 1 GPU" in said
    assert "2 CPUs" in said
    said = told("simulate", written(tmp_path, RUN), *options[:4], code=Exit.BAD_INPUT)
    assert "give --storage FOLDER, one that all nodes see" in said
