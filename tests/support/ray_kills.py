"""Kills on Ray: crews, nodes and the coordinator of a run die by SIGKILL at moments that a seed draws."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from promptfed.experiments.cluster.connection import import_ray, started

CREWS = 2
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}
CREW_PROCESS, COORDINATOR_MODULE = "ray::CrewActor", "promptfed.coordinator"
KILLED: dict[str, Any] = {
    "name": "killed", "method": {"name": "fedpgp"}, "rounds": 40, "seed": 1,
    "training": {"batch_size": 8, "learning_rate": 0.02}, "participation": {"min_clients": 2},
    "evaluation": {"every": 20},
    "clients": {
        "count": 6,
        "name": "site-{index}",
        "data": "symbols:painting?topic=faces&per_class=12&test_per_class=2&partition=iid"
        "&clients={count}&client={index}",
    },
}  # fmt: skip


def command(run: Mapping[str, Any], folder: Path, *options: str) -> list[str]:
    """``promptfed simulate`` of a run file that is written into ``folder``."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dict(run)))
    return [sys.executable, "-m", "promptfed", "simulate", str(path), "--json", *options]


@dataclass
class Nodes:
    """Ray nodes on this machine: a head without a place for crews, and some with."""

    cluster: Any
    nodes: list[Any] = field(default_factory=list)

    def add(self) -> None:
        """One more."""
        self.nodes.append(started(lambda: self.cluster.add_node(**NODE), lambda: None))

    def kill(self, chosen: int) -> None:
        """SIGKILL to one of them with all that runs there; another comes in its place."""
        node = self.nodes.pop(chosen % len(self.nodes))
        for _, processes in node.all_processes.items():
            for running in processes:
                _kill_tree(running.process.pid)
        self.cluster.remove_node(node, allow_graceful=False)
        self.add()

    def actors(self, process: str = CREW_PROCESS) -> list[psutil.Process]:
        """The processes of an actor class, by default of crews; an actor without CPUs may be on the head."""
        nodes = [*self.nodes, self.cluster.head_node]
        running = [process for node in nodes for many in node.all_processes.values() for process in many]
        children = [child for each in running for child in below(each.process.pid)]
        return [child for child in children if child.name().startswith(process[:15])]


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill_tree(pid: int) -> None:
    for process in [*below(pid), *([psutil.Process(pid)] if psutil.pid_exists(pid) else [])]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def ray_nodes(count: int) -> Iterator[Nodes]:
    """``count`` nodes beside the head, taken away at the end."""
    ray = import_ray()
    from ray.cluster_utils import Cluster

    head = {**NODE, "num_cpus": 0, "include_dashboard": False}
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head), ray.shutdown)
    nodes = Nodes(cluster)
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        cluster.shutdown()


@dataclass
class Kills:
    """How many of each are still to be killed, and how many were."""

    crews: int
    nodes: int
    coordinators: int
    done: dict[str, int] = field(default_factory=lambda: {"crews": 0, "nodes": 0, "coordinators": 0})

    def left(self) -> list[str]:
        """A name for each that is left."""
        return [name for name, count in self.done.items() for _ in range(getattr(self, name) - count)]


def killed(kills: Kills, seed: int, pause: tuple[float, float], run: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON that ``promptfed simulate`` prints of a run whose crews, nodes and coordinator are killed meanwhile."""
    draw = random.Random(seed)
    with ray_nodes(CREWS) as nodes, tempfile.TemporaryDirectory(prefix="promptfed-") as folder:
        place = Path(folder)
        options = ["--engine", "ray", "--crews", str(CREWS), "--address", nodes.cluster.address]
        running = subprocess.Popen(
            command(run, place, *options, "--storage", str(place / "storage")), stdout=(place / "told").open("wb"),
            stderr=(place / "log").open("wb"), start_new_session=True,
        )  # fmt: skip
        try:
            while running.poll() is None:
                waited = time.monotonic() + draw.uniform(*pause)
                while running.poll() is None and time.monotonic() < waited:
                    time.sleep(0.05)
                _kill_one(kills, nodes, running.pid, draw)
            if running.returncode:
                raise RuntimeError((place / "log").read_text())
            told: dict[str, Any] = json.loads((place / "told").read_text().splitlines()[-1])
            return told
        finally:
            if running.poll() is None:
                print((place / "log").read_text(), file=sys.stderr)
                running.send_signal(signal.SIGTERM)
                running.wait()


def _kill_one(kills: Kills, nodes: Nodes, command: int, draw: random.Random) -> None:
    """Kill one of those that are left, once the crews are at work."""
    crews, left = nodes.actors(), kills.left()
    if not left or not crews:
        return
    kind = draw.choice(left)
    if kind == "crews":
        draw.choice(crews).kill()
    elif kind == "nodes":
        nodes.kill(draw.randrange(len(nodes.nodes)))
    else:
        serving = [child for child in below(command) if COORDINATOR_MODULE in " ".join(child.cmdline())]
        if not serving:
            return
        serving[0].kill()
    kills.done[kind] += 1
    print(f"{time.strftime('%H:%M:%S')} killed {kills.done}", file=sys.stderr)
