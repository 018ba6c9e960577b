"""Ray that is not installed, not reachable or too small: one line that names what is wrong, before anything starts."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from promptfed.cli.app import exit_code
from promptfed.cli.main import app
from promptfed.experiments.cluster.connection import Node, connected, expect_room, import_ray
from promptfed.experiments.cluster.run import expect_same
from promptfed.runtime.run_file import read_run
from promptfed.shared import get_extra
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import resolve_spec
from promptfed.shared.service.reasons import Exit
from tests import ROOT

NODES = [Node("192.0.2.1", 4.0, 1.0), Node("192.0.2.2", 2.0, 0.0)]


@pytest.mark.parametrize(("count", "cpus", "gpus"), [(6, 1, 0), (3, 2, 0), (4, 1, 0.25), (10, 0.5, 0), (1, 4, 1)])
def test_what_fits_is_let_in(count: int, cpus: float, gpus: float) -> None:
    expect_room(NODES, count, cpus, gpus)


@pytest.mark.parametrize(("count", "cpus", "gpus", "said"), [
    (7, 1, 0, r"no room for 7 crews of 1 CPU each: it holds 6 \(192.0.2.1: 4 CPUs and 1 GPU; 192.0.2.2: 2 CPUs\)"),
    (2, 4, 0, "no room for 2 crews of 4 CPUs each: it holds 1 .*give --crews 1, or a larger cluster"),
    (5, 1, 0.25, "no room for 5 crews of 1 CPU and 0.25 GPUs each: it holds 4"),
    (1, 5, 0, "no room for 1 crew of 5 CPUs: it holds 0 .*give fewer torch threads"),
    (1, 1, 2, "no room for 1 crew of 1 CPU and 2 GPUs: it holds 0"),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_what_there_is(count: int, cpus: float, gpus: float, said: str) -> None:
    with pytest.raises(PromptfedError, match=said) as refused:
        expect_room(NODES, count, cpus, gpus)
    assert exit_code(refused.value) == Exit.BAD_INPUT


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PromptfedError, match=rf"ray is not installed: {re.escape(get_extra('ray'))}"):
        import_ray()


@pytest.mark.parametrize(("address", "said", "exit"), [
    ("ray://127.0.0.1:10001", "run the command on a machine of the cluster", Exit.BAD_INPUT),
    ("somewhere", "write auto on a machine of the cluster, or its HOST:PORT", Exit.BAD_INPUT),
    ("127.0.0.1:{port}", r"no Ray cluster answers at [0-9.]+:\d+ \(.+\): start one with `ray start", 4),
])  # fmt: skip
def test_an_address_that_leads_nowhere(address: str, said: str, exit: Exit) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        port = closed.getsockname()[1]
        with pytest.raises(PromptfedError, match=said) as refused, connected(address.format(port=port)):
            pass
    assert exit_code(refused.value) == exit


def test_versions_must_be_the_same() -> None:
    ours = {"promptfed": "1.0", "torch": "2.9"}
    expect_same(dict(ours), ours)
    with pytest.raises(PromptfedError, match=r"torch 2\.8 instead of 2\.9: install the same on all"):
        expect_same({"promptfed": "1.0", "torch": "2.8"}, ours)


# The recipes for a cluster: the files in deploy/ray, as far as they can be held without a cluster.


RECIPES = ROOT / "deploy" / "ray"


KUBERNETES = "1.33"


ENVIRONMENT = os.environ | {"LC_ALL": "C"}  # bash warns of a locale that is not installed


def commands(text: str) -> list[list[str]]:
    """Every call of ``promptfed`` in a script, with its variables as words."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = [line[line.index("promptfed simulate") :] for line in joined.splitlines() if "promptfed simulate" in line]
    plain = [re.sub(r'"?\$\{?(\w+)[^"}]*\}?"?', r"\1", line.removesuffix(";;")) for line in found]
    return [shlex.split(line)[1:] for line in plain]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of the command, by their parameters' names; click refuses what it does not know."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    command = group.commands[arguments[0]]
    return dict(command.make_context(arguments[0], list(arguments[1:])).params)


def rayjob() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all((RECIPES / "rayjob.yaml").read_text())
    return claim, job


def test_the_run_file_can_be_run() -> None:
    run = read_run(RECIPES / "run.yaml")
    spec = resolve_spec(run.spec)
    assert sum(site.role == "trainer" for site in run.sites) >= spec.participation.min_clients


@pytest.mark.parametrize("name", ["by-hand.sh", "slurm.sbatch"])
def test_a_script_is_one(name: str) -> None:
    path = RECIPES / name
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in path.read_text()


@pytest.mark.parametrize("name", ["by-hand.sh", "slurm.sbatch"])
def test_a_script_calls_the_command_as_it_is(name: str) -> None:
    text = (RECIPES / name).read_text().replace("${4:-2}", "2")
    [found] = commands(text)
    options = parsed(found)
    assert (options["engine"], options["address"]) == ("ray", "auto")
    assert options["storage"] is not None


def test_slurm_starts_one_ray_on_each_node() -> None:
    text = (RECIPES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    crews = parsed(commands(text)[0])["crews"]
    assert crews <= int(asked["nodes"]) * int(asked["cpus-per-task"])
    assert re.search(
        r'srun ray symmetric-run --address "\$first:6379" --min-nodes "\$SLURM_JOB_NUM_NODES" .*-- \\\n', text
    )


@pytest.mark.extended
def test_the_claim_and_the_pods_of_the_job_are_what_kubernetes_takes(tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="manifests: pip install kubernetes-validate"
    )
    claim, job = rayjob()
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        mounted = {mount["name"] for one in group["template"]["spec"]["containers"] for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**claim, "sepc": {}}, KUBERNETES, strict=True)
