"""`promptfed demo` with its real processes: the result's form, death and restart, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from typer.testing import CliRunner

from promptfed.cli.commands.run import demo_sites, demo_spec
from promptfed.cli.main import app
from promptfed.shared import get_extra
from promptfed.shared.data.demo import DEMOS
from promptfed.shared.service.reasons import Exit
from tests.support.waiting import PATIENCE, wait_for

STARTER = "promptfed.client_service.starter"
DEMO = [sys.executable, "-m", "promptfed", "demo"]


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*DEMO, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def services(parent: int) -> dict[str, psutil.Process]:
    """The demo's own processes by name: coordinator and clients."""
    found = {}
    for child in psutil.Process(parent).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        names = [part.removeprefix("--name=") for part in command if part.startswith("--name=")]
        if STARTER in command and child.parent().pid != parent:  # a client that is forked has its name alone
            names = [child.name()]
        if "promptfed.coordinator" in command or names:
            found[names[0] if names else "coordinator"] = child
    return found


def wait_for_demo(demo: subprocess.Popen[str], what: str, condition: Callable[[], Any]) -> Any:
    def ended() -> str | None:
        return None if demo.poll() is None else f"it ended with {demo.returncode}\n{demo.communicate()}"

    return wait_for(what, condition, every=0.1, ended=ended)


def log_says(folder: Path, log: str, text: str) -> bool:
    path = folder / log
    return path.exists() and text in path.read_text()


def check_result(result: dict[str, Any], data: str, method: str, rounds: int) -> None:
    figures = ["zero_shot", "federated", "intervals"]
    assert list(result) == ["method", "rounds", "seconds", *figures, "bytes_up", "bytes_down", "state_hash"]
    assert (result["method"], result["rounds"]) == (method, rounds)
    clients = {f"client:{name}" for name, _ in DEMOS[data].clients}
    splits = set(result["federated"])
    assert splits == set(result["zero_shot"])
    assert clients < splits
    assert [name.split(":")[0] for name in splits - clients] == ["unseen"]
    assert all(0 < accuracy <= 1 for accuracy in [*result["zero_shot"].values(), *result["federated"].values()])


@pytest.mark.slow  # the wheel's test runs a demo by default, and the services' tests kill the same two processes
def test_symbols_survive_kills_on_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = start("--rounds", "3", "--json", "--keep", str(folder))
    try:
        victim = DEMOS["symbols"].clients[0][0]
        found = wait_for_demo(
            demo,
            "a first round",
            lambda: services(demo.pid) if log_says(folder, f"client-{victim}.log", "train: loss") else None,
        )
        found[victim].kill()
        found["coordinator"].kill()
        out, errors = demo.communicate(timeout=PATIENCE)
    finally:
        demo.kill()
    assert demo.returncode == Exit.OK, errors
    assert log_says(folder, f"client-{victim}.log", "nrolled")
    result = json.loads(out.splitlines()[-1])
    check_result(result, "symbols", "fedtaskres", 3)
    # Three rounds of residuals (102, d_e) from three clients, and what stands around the tensors.
    assert 3 * 3 * 102 * 96 * 4 < result["bytes_up"] < 400_000
    assert not any(process.is_running() for process in found.values())


@pytest.mark.extended
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything(sent: int, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = start("--rounds", "50", "--keep", str(folder))
    try:
        found = wait_for_demo(demo, "the start of all five", lambda: all_started(services(demo.pid)))
        os.kill(demo.pid, sent)
        _, errors = demo.communicate(timeout=PATIENCE)
    finally:
        demo.kill()
    assert demo.returncode == Exit.INTERRUPTED, errors
    assert not any(process.is_running() for process in found.values())


def test_photographs_that_are_not_installed_are_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.shared.data.photographs.find_spec", lambda name: None)
    monkeypatch.setattr("promptfed.cli.commands.run.started_services", started := Mock())
    result = CliRunner().invoke(app, ["demo", "--data", "solar"])
    assert (result.exit_code, started.called) == (3, False)
    assert f"needs the package elpv-dataset: {get_extra('photos')}." in " ".join(result.stderr.split())


def test_the_last_line_names_two_others_that_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation itself is not run here: its result is as `conduct` returns it."""
    monkeypatch.setattr("promptfed.cli.commands.run.started_services", lambda *given: nullcontext())
    monkeypatch.setattr("promptfed.cli.commands.run.conduct", Mock())
    monkeypatch.setattr("promptfed.cli.commands.run.show_result", lambda *given: None)
    for own, named in ((), ["fedclipadapter", "promptfl"]), (("--method", "promptfl"), ["fedclipadapter"]):
        result = CliRunner().invoke(app, ["demo", *own])
        assert re.findall(r"--method (\w+) \(about \+\d+ points\)", result.stdout) == named
    assert "--method" not in CliRunner().invoke(app, ["demo", "--rounds", "3"]).stdout  # gains are of all rounds


def all_started(found: dict[str, psutil.Process]) -> dict[str, psutil.Process] | None:
    return found if len(found) == 5 else None


def test_the_unseen_domain_is_left_out_where_nobody_has_a_classifier_for_it() -> None:
    demo = DEMOS["symbols"]
    roles = {
        method: [site.role for site in demo_sites(demo, demo_spec(demo, method, None, 0))]
        for method in ("pfedpg", "fedpgp", "singleset_vpt")
    }
    assert roles["pfedpg"] == ["trainer"] * 3
    assert roles["fedpgp"] == roles["singleset_vpt"] == ["trainer"] * 3 + ["evaluator"]
