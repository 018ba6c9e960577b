"""A simulation of 100 clients beside Flower's simulation engine, which runs in a Python of its own.

Both train a context of 16 vectors on the same image features, from the same start, with the same batches and the same
code of the backbone, on two cores. Our side is the whole simulation: coordinator, enrolment, durable rounds, and
an evaluation before the first round and after the last; Flower's keeps everything in memory and does not evaluate. The
features are computed beforehand. "plain" clients of Flower compute every position of the text tower, as CoOp's code.

    python -m benchmarks.flower.simulation --repeat 3 --json beside.json

``seconds`` are those of a whole command, from its start to its end. ``seconds_of_rounds`` leave out loading and
enrolment, but Flower's contain the start of Ray's workers. ``others`` are the cores that other processes kept busy.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.flower.beside import own_python
from benchmarks.harness import parser, table, write
from benchmarks.simulation import plan
from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.experiments.bench.runner import provenance
from promptfed.experiments.simulation.preparation import open_site, prepare
from promptfed.experiments.simulation.simulation import simulate
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import decode

CLIENTS, ROUNDS, M = 100, 10, 16
WANTED = "flwr[simulation]>=1.41,<1.43"
MOST_SECONDS = 900
ROOT = Path(__file__).parents[2]


def spec_and_sites(fraction: float) -> tuple[dict[str, Any], list[Any]]:
    """The job; ``fraction`` of the clients train in each round."""
    spec, sites = plan(CLIENTS, ROUNDS)
    return spec | {"participation": {"fraction": fraction}, "method": {"name": "promptfl", "m": M}}, sites


def prepare_job(folder: Path, fraction: float, path: str) -> None:
    """Compute the features, and write what Flower's side reads."""
    spec, sites = spec_and_sites(fraction)
    resolved, _, backbone = prepare(spec, sites, 1, None, False)
    shared, cache = SharedSources(), FeatureCache(folder / "features")
    arrays = {"context": torch.randn(M, backbone.d_t, generator=initial_draws(resolved.seed)).numpy() * 0.02}
    names: Sequence[str] = ()
    for number, site in enumerate(sites):
        client = open_site(site, shared)
        data, names = ClientData(client.source, backbone, cache), client.source.class_names
        arrays[f"features-{number}"] = data.features(TRAIN).numpy()
        arrays[f"labels-{number}"] = data.split(TRAIN, tuple(names)).labels.numpy()
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    training = resolved.training
    sgd = {"lr": training.learning_rate, "momentum": training.momentum, "weight_decay": training.weight_decay}
    job = {"clients": CLIENTS, "rounds": ROUNDS, "fraction": fraction, "seed": resolved.seed, "path": path, "sgd": sgd}
    job |= {"batch_size": training.batch_size, "backbone": [backbone.model_name, backbone.pretrained]}
    (folder / "job.json").write_text(json.dumps(job | {"class_names": list(names)}))


def simulated(folder: Path, pool: int) -> dict[str, Any]:
    """Our side, in this process."""
    torch.set_num_threads(1)
    fraction = json.loads((folder / "job.json").read_text())["fraction"]
    result = simulate(*spec_and_sites(fraction), pool=pool, features=folder / "features")
    context = decode(result.body)[0]["context"]
    return {
        "seconds_of_rounds": result.wall_seconds,
        "state_hash": result.state_hash,
        "context": torch.as_tensor(context).tolist(),
    }


def ours(folder: Path, pool: int) -> dict[str, Any]:
    """Our side in a process of its own, with the CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", __spec__.name, "--run", f"{folder}:{pool}"]
    done = subprocess.run(  # noqa: S603 (ourselves)
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=MOST_SECONDS
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"cpu_seconds": cpu}


def flowers(python: str, folder: Path) -> dict[str, Any]:
    """Flower's side."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_HOME": str(folder / "flwr")}
    environment = os.environ | quiet | {"PYTHONPATH": str(ROOT), "FLOWER_JOB": str(folder)}
    command = [python, str(Path(__file__).parent / "engine.py")]
    done = subprocess.run(  # noqa: S603 (ourselves)
        command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"Flower's run failed:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return figures


def share_packages(python: str) -> None:
    """Let Flower's Python find torch and the other packages of this one, after its own."""
    for packages in Path(python).parent.parent.glob("lib/python*/site-packages"):
        (packages / "promptfed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The run's figures, its seconds, and how many cores other processes kept busy meanwhile."""
    started, busy = time.perf_counter(), _busy_seconds()
    figures = run()
    seconds = time.perf_counter() - started
    return figures | {"seconds": seconds, "others": (_busy_seconds() - busy - figures["cpu_seconds"]) / seconds}


def _busy_seconds() -> float:
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def compare(python: str, fraction: float, path: str, repeats: int) -> dict[str, Any]:
    """All runs of a job, interleaved. SystemExit if the sides come to different contexts."""
    with tempfile.TemporaryDirectory(prefix="promptfed-beside-flower-") as name:
        folder = Path(name)
        prepare_job(folder, fraction, path)
        sides: dict[str, Callable[[], dict[str, Any]]] = {
            "one thread": lambda: ours(folder, 1),
            "two processes": lambda: ours(folder, 2),
            "Flower": lambda: flowers(python, folder),
        }
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, run in sides.items():
                runs[side].append(timed(run))
                print(side, {key: value for key, value in runs[side][-1].items() if key != "context"}, file=sys.stderr)
    contexts = [np.array(run.pop("context")) for side in runs.values() for run in side]
    hashes = {run["state_hash"] for side in ("one thread", "two processes") for run in runs[side]}
    apart = max(float(np.abs(context - contexts[0]).max()) for context in contexts)
    # Who is drawn for a round differs, so that only a job of all clients comes to one context.
    if len(hashes) > 1 or (fraction == 1 and apart > 1e-3):
        raise SystemExit(f"not the same job: states {hashes}, contexts {apart} apart")
    return {"fraction": fraction, "path": path, "contexts_apart": apart, "runs": runs}


def shown(job: dict[str, Any]) -> str:
    """The job's table: medians, and their ratio to Flower's."""
    keys = ("seconds", "seconds_of_rounds", "cpu_seconds", "others")
    medians = {
        side: {key: statistics.median(run[key] for run in runs) for key in keys} for side, runs in job["runs"].items()
    }
    rows = [
        [side, *(f"{own[key]:.1f}" for key in keys), f"{own['seconds'] / medians['Flower']['seconds']:.2f}"]
        for side, own in medians.items()
    ]
    title = f"{job['fraction']:g} of the clients in a round, {job['path']} clients of Flower"
    return f"{title}\n{table(('side', *keys, 'seconds over Flower'), rows)}"


def main() -> None:
    """Compare and print."""
    command = parser(__doc__)
    command.add_argument("--repeat", type=int, default=3)
    command.add_argument("--jobs", nargs="+", default=["1:auto", "0.1:auto", "1:plain"], help="FRACTION:PATH")
    command.add_argument("--python", help=f"a Python with {WANTED}; default: one is made for this run")
    command.add_argument("--run", help="FOLDER:POOL: run our side in this process and print its figures as JSON")
    options = command.parse_args()
    if options.run:
        folder, pool = options.run.rsplit(":", 1)
        print(json.dumps(simulated(Path(folder), int(pool))))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with own_python(WANTED, options.python) as python:
        share_packages(python)
        jobs = [compare(python, float(job.split(":")[0]), job.split(":")[1], options.repeat) for job in options.jobs]
    print("\n\n".join(map(shown, jobs)))
    write(options.json, {"jobs": jobs, "provenance": provenance().model_dump()})


if __name__ == "__main__":
    main()
