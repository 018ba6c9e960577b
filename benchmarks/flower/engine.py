"""A job of ``benchmarks.flower.simulation`` in Flower's simulation engine.

    FLOWER_JOB=FOLDER python benchmarks/flower/engine.py

Runs in a Python with flwr, Ray, and what promptfed's backbone needs. ``job.json`` and ``data.npz`` of the folder hold
the settings, the initial context, and each client's image features and labels; ``result.json`` gets the figures. Each
worker process of Ray loads backbone and data once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from promptfed.shared.clip import load_backbone
from promptfed.shared.seeds import generator

CORES = 2
FOLDER = Path(os.environ["FLOWER_JOB"])
client_app, server_app = ClientApp(), ServerApp()


def cpu_seconds() -> float:
    """CPU seconds of this process and all below it."""
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for process in seconds:
        ancestor = process
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += seconds[process] if ancestor else 0.0
    return total


@functools.cache
def loaded() -> tuple[dict[str, Any], dict[str, torch.Tensor], Any, Any]:
    """Settings, data, backbone and tokenised class names, once in each process."""
    torch.set_num_threads(1)
    job = json.loads((FOLDER / "job.json").read_text())
    data = {name: torch.from_numpy(array) for name, array in np.load(FOLDER / "data.npz").items()}
    backbone = load_backbone(*job["backbone"])
    return job, data, backbone, backbone.class_prompts(tuple(job["class_names"]), len(data["context"]))


def trained(start: np.ndarray, number: int, round: int) -> tuple[np.ndarray, int]:
    """The context after a task of client ``number``, and its number of images."""
    job, data, backbone, prompts = loaded()
    features, labels = data[f"features-{number}"], data[f"labels-{number}"]
    context = torch.from_numpy(start.copy()).requires_grad_()
    optimizer = torch.optim.SGD([context], **job["sgd"])
    draws = generator(job["seed"], round, "train", f"site-{number}", "batches")
    for rows in torch.split(torch.randperm(len(labels), generator=draws), job["batch_size"]):
        optimizer.zero_grad()
        text = backbone.encode_prompts(context, prompts, path=job["path"])
        logits = backbone.logit_scale * features[rows] @ text.T
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits, labels[rows]))
        optimizer.step()
    return context.detach().numpy(), len(labels)


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Answer a task."""
    start = message.content["arrays"]["context"].numpy()
    number, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    learned, images = trained(start, number, round)
    answer = {"arrays": arrays(learned), "metrics": MetricRecord({"num-examples": images})}
    return Message(content=RecordDict(answer), reply_to=message)


@server_app.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Carry out all rounds, and write the result."""
    job = json.loads((FOLDER / "job.json").read_text())
    strategy = FedAvg(fraction_train=job["fraction"], fraction_evaluate=0.0, min_available_nodes=job["clients"])
    started = time.perf_counter()
    result = strategy.start(grid, arrays(np.load(FOLDER / "data.npz")["context"]), num_rounds=job["rounds"])
    figures: dict[str, Any] = {"seconds_of_rounds": time.perf_counter() - started, "cpu_seconds": cpu_seconds()}
    figures |= {name: importlib.metadata.version(name) for name in ("flwr", "ray")}
    context_rows = result.arrays["context"].numpy().tolist()
    (FOLDER / "result.json").write_text(json.dumps(figures | {"context": context_rows}))


def arrays(context: np.ndarray) -> ArrayRecord:
    """The context as Flower sends it."""
    return ArrayRecord({"context": Array(context)})


def run() -> None:
    """Run the engine with a worker process for each core."""
    clients = json.loads((FOLDER / "job.json").read_text())["clients"]
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    engine: dict[str, Any] = {"init_args": {"num_cpus": CORES}, "client_resources": resources}
    run_simulation(server_app, client_app, clients, backend_config=engine)


if __name__ == "__main__":
    # By its name, so that Ray's workers import this file, and keep what they have loaded.
    from benchmarks.flower import engine

    engine.run()
