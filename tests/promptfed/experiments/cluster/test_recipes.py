"""The recipes for a cluster: the files in deploy/ray, as far as they can be held without a cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import typer
import yaml

from promptfed.cli.main import app
from promptfed.runtime.run_file import read_run
from promptfed.sdk.backbone import resolve
from tests import ROOT

RECIPES = ROOT / "deploy" / "ray"
KUBERNETES = "1.33"
ENVIRONMENT = os.environ | {"LC_ALL": "C"}  # bash warns of a locale that is not installed
# Of the operator's API reference: a key that it does not know is dropped without a word.
OF_A_JOB = {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec"}
OF_A_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


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
    spec = resolve(run.spec)
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


def test_the_script_by_hand_tells_its_uses() -> None:
    done = subprocess.run(["bash", str(RECIPES / "by-hand.sh")], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["head", "worker", "run", "stop"]


def test_slurm_starts_one_ray_on_each_node() -> None:
    text = (RECIPES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    crews = parsed(commands(text)[0])["crews"]
    assert crews <= int(asked["nodes"]) * int(asked["cpus-per-task"])
    assert re.search(
        r'srun ray symmetric-run --address "\$first:6379" --min-nodes "\$SLURM_JOB_NUM_NODES" .*-- \\\n', text
    )


@pytest.mark.slow
def test_ray_knows_the_options_that_the_scripts_give_it() -> None:
    from ray.scripts.scripts import cli

    def known(name: str) -> set[str]:
        return {option for one in cli.commands[name].params for option in one.opts}

    start = known("start")
    for name in ("by-hand.sh", "slurm.sbatch"):
        text = (RECIPES / name).read_text()
        for line in re.findall(r"exec ray start (.*) ;;", text):
            given = {word.partition("=")[0] for word in shlex.split(line) if word.startswith("--")}
            assert given <= start
    given = set(
        re.findall(r"(--[a-z-]+)", (RECIPES / "slurm.sbatch").read_text().split("symmetric-run")[1].split(" -- ")[0])
    )
    assert given <= known("symmetric-run") | (start - {"--head", "--node-ip-address", "--port", "--block"})
    params = rayjob()[1]["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    assert {f"--{name}" for name in params} <= start


def test_the_claim_and_the_pods_of_the_job_are_what_kubernetes_takes(tmp_path: Path) -> None:
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


def test_the_job_has_room_for_the_crews_that_it_asks_for() -> None:
    claim, job = rayjob()
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(spec) == OF_A_JOB
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    [group] = cluster["workerGroupSpecs"]
    assert set(group) == OF_A_GROUP
    assert set(cluster["headGroupSpec"]) <= OF_A_GROUP
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    options = parsed(shlex.split(spec["entrypoint"])[1:])
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert options["crews"] * options["gpus_per_crew"] <= group["replicas"] * gpus
    mounts = {one["mountPath"] for one in group["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert any(str(options["storage"]).startswith(path) for path in mounts)
    assert str(options["spec"]).startswith("/run/promptfed/")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
