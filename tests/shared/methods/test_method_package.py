"""A method that lives in a package of its own (``tests/support/method_package``), installed and run as users would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from promptfed.shared.data.classes import SYMBOLS
from tests import ROOT
from tests.support.waiting import PATIENCE

PACKAGE = ROOT / "tests" / "support" / "method_package"
DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2"
RUN = {
    "name": "residuals",
    "method": {"name": "task_residual"},
    "class_names": [symbol.name for symbol in SYMBOLS if symbol.topic == "weather"],
    "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4},
    "participation": {"min_clients": 2},
    "clients": [
        {"name": "north", "data": DATA.format("painting")},
        {"name": "south", "data": DATA.format("neon")},
    ],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, in a folder of its own."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source)  # a build leaves files beside its source
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, source], check=True)
    return folder


def promptfed(*arguments: str, beside: Path) -> subprocess.CompletedProcess[str]:
    """``promptfed`` in a process; the package is installed in the folder ``beside``."""
    path = os.pathsep.join(filter(None, [str(beside), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "promptfed", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def test_the_command_lists_it_with_its_package(installed: Path) -> None:
    shown = promptfed("methods", "task_residual", beside=installed)
    assert "(from promptfed-task-residual==0.1.0)" in " ".join(shown.stdout.split()), shown.stderr
    listed = promptfed("methods", "--json", beside=installed)
    assert "task_residual" in [method["name"] for method in json.loads(listed.stdout)]


def run(command: list[str], run_file: Path, installed: Path) -> Any:
    done = promptfed(*command, str(run_file), "--json", beside=installed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_it_runs_in_one_process(installed: Path, run_file: Path) -> None:
    result = run(["simulate"], run_file, installed)
    assert (result["method"], result["rounds"]) == ("task_residual", 2)


@pytest.mark.slow
def test_one_process_and_many_come_to_one_state(installed: Path, run_file: Path) -> None:
    simulated, launched = (run(way, run_file, installed) for way in (["simulate"], ["launch", "--gpus", "none"]))
    assert simulated["state_hash"] == launched["state_hash"]
    assert simulated["rounds"] == launched["rounds"] == 2
