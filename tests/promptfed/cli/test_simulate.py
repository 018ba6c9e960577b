"""`promptfed simulate`: its table, its files, its one JSON object, and its errors in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from promptfed.cli.commands.run import MOST_ROWS, _table, summaries
from promptfed.cli.main import app
from promptfed.sdk.result import Accuracy
from promptfed.shared.service.reasons import Exit
from promptfed.shared.tensors.torch_tensors import state_hash
from tests import ROOT
from tests.support.waiting import PATIENCE, wait_for

EXAMPLE = ROOT / "examples" / "simulate-100.yaml"
RUN = """
name: small
method: {{name: promptfl, m: 4}}
rounds: {rounds}
participation: {{min_clients: 2}}
clients:
  - count: 3
    name: site-{{index}}
    data: symbols:painting?topic=faces&per_class=4&test_per_class=2&partition=iid&clients={{count}}&client={{index}}
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(rounds=2))
    return path


def simulated(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_the_example_runs_with_a_few_clients_and_keeps_what_came_of_it(tmp_path: Path) -> None:
    out, path = tmp_path / "out", tmp_path / EXAMPLE.name
    of_one_topic = EXAMPLE.read_text().replace("blueprint?", "blueprint?topic=faces&")
    path.write_text(of_one_topic.replace("symbols:sketch", "symbols:sketch?topic=faces&test_per_class=2"))
    done = simulated(path, "--clients", 13, "--out", out, "--json", "--pool", 2)
    assert done.exit_code == Exit.OK, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    kept = json.loads((out / "result.json").read_text())
    assert told["clients"] == 14
    assert told["rounds"] == kept["spec"]["rounds"] == 20
    assert told["state_hash"] == kept["state_hash"] == state_hash(load_file(out / "prompts.safetensors"))
    assert [(one["role"], one["split"], one["clients"]) for one in told["accuracy"]] == [
        ("trainer", "test", 13),
        ("evaluator", "test", 1),
    ]
    assert [one["round"] for one in kept["by_round"]] == list(range(21))
    assert {len(one["phases"][0]["counted"]) for one in kept["by_round"][1:]} == {2}  # ten per cent, rounded up
    assert {one["round"] for one in kept["accuracies"]} == {0, 5, 10, 15, 20}
    assert kept["by_round"][-1]["state_hash"] == kept["state_hash"]
    assert kept["backbone_fingerprint"] == kept["spec"]["backbone"]["fingerprint"]
    assert {"packages", "machine"} <= set(kept["provenance"])


def test_few_clients_are_shown_one_by_one(run_file: Path) -> None:
    done = simulated(run_file)
    assert done.exit_code == Exit.OK, done.output
    for shown in ("site-0", "site-1", "site-2", "mean of clients", "State sha256:"):
        assert shown in done.stdout


def accuracies(count: int, **changes: Any) -> list[Accuracy]:
    base = {"round": 1, "role": "trainer", "domain": None, "split": "test", "zero_shot": 0.25, "num_samples": 4}
    return [Accuracy(client=f"c{k}", accuracy=k / 100, **{**base, **changes}) for k in range(count)]


def test_many_clients_are_summed_up() -> None:
    many = [*accuracies(51), *accuracies(3, split="novel"), *accuracies(2, role="evaluator", zero_shot=None)]
    own, novel, unseen = summaries(many)
    assert (own.role, own.split, own.clients, own.worst, own.zero_shot) == ("trainer", "test", 51, 0.0, 0.25)
    assert own.mean == pytest.approx(0.25)
    assert own.sd == pytest.approx(torch.arange(51).div(100).std().item())
    assert (novel.split, novel.clients, novel.mean) == ("novel", 3, pytest.approx(0.01))
    assert (unseen.role, unseen.zero_shot, summaries(accuracies(1))[0].sd) == ("evaluator", None, None)
    assert _table(many, "many").row_count == 3
    assert _table(accuracies(MOST_ROWS), "few").row_count == MOST_ROWS + 1  # and their mean


@pytest.mark.slow
@pytest.mark.parametrize("kept", [[], ["--out", "out"]])
def test_ctrl_c_ends_it_within_seconds(kept: list[str], tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(RUN.format(rounds=100_000))
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "promptfed", "simulate", str(path), *kept],
            stderr=output,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_for("round 1", lambda: bool(re.search("round [1-9]", log.read_text())) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert process.wait(PATIENCE) == Exit.INTERRUPTED, log.read_text()
        assert time.monotonic() - sent < 15
    finally:
        process.kill()
        process.wait()
    goes_on = "; the same command goes on with the rounds in out" if kept else ""
    assert log.read_text().splitlines()[-1] == "promptfed: interrupted" + goes_on
    assert not list(tmp_path.glob("promptfed-*"))
