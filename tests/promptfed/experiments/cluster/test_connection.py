"""Ray that is not installed, not reachable or too small: one line that names what is wrong, before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.cluster.connection import Node, connected, expect_room, import_ray
from promptfed.experiments.cluster.run import expect_same
from promptfed.sdk.client import CommandError, Exit

NODES = [Node("192.0.2.1", 4.0, 1.0), Node("192.0.2.2", 2.0, 0.0)]


@pytest.mark.parametrize(("count", "cpus", "gpus"), [(6, 1, 0), (3, 2, 0), (4, 1, 0.25), (10, 0.5, 0), (1, 4, 1)])
def test_what_fits_is_let_in(count: int, cpus: float, gpus: float) -> None:
    expect_room(NODES, count, cpus, gpus)


@pytest.mark.parametrize(
    ("count", "cpus", "gpus", "said"),
    [
        (7, 1, 0, r"no room for 7 crews of 1 CPU each: it holds 6 \(192.0.2.1: 4 CPUs and 1 GPU; 192.0.2.2: 2 CPUs\)"),
        (2, 4, 0, "no room for 2 crews of 4 CPUs each: it holds 1 .*give --crews 1, or a larger cluster"),
        (5, 1, 0.25, "no room for 5 crews of 1 CPU and 0.25 GPUs each: it holds 4"),
        (1, 5, 0, "no room for 1 crew of 5 CPUs: it holds 0 .*give fewer torch threads"),
        (1, 1, 2, "no room for 1 crew of 1 CPU and 2 GPUs: it holds 0"),
    ],
)
def test_what_does_not_fit_is_named_with_what_there_is(count: int, cpus: float, gpus: float, said: str) -> None:
    with pytest.raises(CommandError, match=said) as refused:
        expect_room(NODES, count, cpus, gpus)
    assert refused.value.exit == Exit.BAD_INPUT


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CommandError, match=r"ray is not installed: pip install 'promptfed\[ray\]'"):
        import_ray()


@pytest.mark.parametrize(
    ("address", "said", "exit"),
    [
        ("ray://127.0.0.1:10001", "run the command on a machine of the cluster", Exit.BAD_INPUT),
        ("somewhere", "write auto on a machine of the cluster, or its HOST:PORT", Exit.BAD_INPUT),
        ("127.0.0.1:{port}", r"no Ray cluster answers at [0-9.]+:\d+ \(.+\): start one with `ray start", 4),
    ],
)
def test_an_address_that_leads_nowhere(address: str, said: str, exit: Exit) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        port = closed.getsockname()[1]
        with pytest.raises(CommandError, match=said) as refused, connected(address.format(port=port)):
            pass
    assert refused.value.exit == exit


def test_versions_must_be_the_same() -> None:
    ours = {"promptfed": "1.0", "torch": "2.9"}
    expect_same(dict(ours), ours)
    with pytest.raises(CommandError, match=r"torch 2\.8 instead of 2\.9: install the same on all"):
        expect_same({"promptfed": "1.0", "torch": "2.8"}, ours)


RUN = """
name: small
method: {name: promptfl}
rounds: 1
clients: {count: 2, data: "symbols:painting?topic=faces&per_class=2&test_per_class=1&client={index}&clients=2"}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--crews", "2", "--storage", "x"], "--crews, --storage: for --engine ray; add it, or leave them out"),
        (["--engine", "ray", "--crews", "3"], "3 crews cannot share 2 clients: give --crews from 1 to 2"),
        (["--engine", "ray", "--gpus-per-crew", "1.5"], "Ray gives shares of one GPU, or whole ones"),
        (["--engine", "ray", "--device", "cuda"], "Ray shows a crew no GPU that it has not asked for"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: list[str], said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    done = CliRunner().invoke(app, ["simulate", str(path), *options])
    assert done.exit_code == Exit.BAD_INPUT
    assert said in " ".join(done.output.split())
