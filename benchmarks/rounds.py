"""Asynchronous against synchronous rounds in virtual time: 50 clients whose speeds differ by a factor of 20.

    python -m benchmarks.rounds --json benchmarks/rounds.json --figure docs/images/rounds.svg

Each run keeps its states. They are tested afterwards on all test images of the domain, so that evaluations do not
disturb the asynchronous rounds. ``gain`` is the synchronous run's; both times are to 95 % of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from benchmarks.harness import integers, parser, table, write
from promptfed.client_service.training.data import TEST, ClientData
from promptfed.client_service.training.evaluation import accuracy
from promptfed.coordinator.app import create_app, lifespan
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import OPERATOR_FILE
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.simulation import URL, SimulationOptions, simulate
from promptfed.export.adapted_model import AdaptedModel
from promptfed.runtime.services import Site
from promptfed.runtime.speeds import Clock
from promptfed.sdk import operations
from promptfed.sdk.client import AsyncCoordinator
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny
from promptfed.shared.data.sharing import SharedSources

CLIENTS, SLOWEST, ROUNDS, SHARE = 50, 20.0, 12, 0.95
DATA = "symbols:blueprint?topic=games&per_class=64&test_per_class=40"
BUFFER, VERSIONS = 10, 120
METHODS: Mapping[str, Mapping[str, Any]] = {
    "promptfl": {"learning_rate": 0.02},
    "fedclip": {},
    "fedavg": {},
}
Curve = list[tuple[float, float]]
"""Virtual seconds and accuracy of each state."""


class Trial:
    """One method and seed, with what all runs share."""

    def __init__(
        self, method: str, seed: int, folder: Path, backbone: Backbone, data: str = DATA, count: int = CLIENTS
    ):
        self.method, self.seed, self.folder, self.backbone = method, seed, folder, backbone
        self.features, self.sources = FeatureCache(folder / "features"), SharedSources()
        parts = f"{data}&partition=dirichlet&alpha=0.3&clients={count}&partition_seed={seed}"
        self.sites = [Site(f"site-{number:02d}", f"{parts}&client={number}") for number in range(count)]
        self.test = ClientData(self.sources.open(data, "evaluator"), backbone, self.features)

    def run(self, name: str, rounds: int, training: Mapping[str, Any], **sections: Any) -> Curve:
        """The accuracy of every state of a federation with these further ``sections`` of its spec."""
        spec = {
            "name": "rounds",
            "method": {"name": self.method},
            "rounds": rounds,
            "class_names": list(self.test.class_names),
            "training": {"epochs": 1, "batch_size": 8, "schedule": "constant", **training},
            "evaluation": {"every": rounds},
            "retention": "all",
            "seed": self.seed,
            **sections,
        }
        options = SimulationOptions(clock=Clock(speeds="lognormal", slowest=SLOWEST))
        shared: dict[str, Any] = {"features": self.features, "sources": self.sources, "options": options}
        folder = self.folder / name
        result = simulate(spec, self.sites, folder=folder, backbone=self.backbone, **shared)
        times = (0.0, *result.virtual_seconds)
        return [(seconds, self.accuracy(one)) for seconds, one in zip(times, states(folder, result), strict=True)]

    def accuracy(self, result: FederationResult) -> float:
        """On all test images, among all classes."""
        served = AdaptedModel.of(result).serve(self.backbone, self.test.class_names)
        return accuracy(served.classifier, self.test.split(TEST, self.test.class_names))


def states(folder: Path, result: FederationResult) -> list[FederationResult]:
    """The results after each round of the simulation in ``folder``, from the initial state on."""

    async def read() -> list[FederationResult]:
        settings = Settings(data_dir=folder / "coordinator", database_url=None, bootstrap=None)
        app = create_app(settings)
        async with lifespan(app), httpx.AsyncClient(transport=InProcess(app), base_url=URL) as http:
            api = AsyncCoordinator(http, (settings.data_dir / OPERATOR_FILE).read_text().strip())
            told = []
            for round in range(result.round + 1):
                answer = await api.send(operations.get_prompts(result.status["id"], round))
                told.append(replace(result, round=round, body=answer.body))
            return told

    return asyncio.run(read())


def reached(curve: Curve, level: float) -> float | None:
    """The virtual seconds at which a state is first this accurate; None: never."""
    return next((seconds for seconds, value in curve if value >= level), None)


def compared(method: str, seed: int, backbone: Backbone) -> dict[str, Any]:
    """Both schedules' curves and times."""
    with TemporaryDirectory() as folder:
        trial = Trial(method, seed, Path(folder), backbone)
        everybody: dict[str, Any] = {"participation": {"min_clients": CLIENTS}}
        synchronous = trial.run("synchronous", ROUNDS, METHODS[method], **everybody)
        everybody["schedule"] = {"kind": "buffered", "buffer": BUFFER}
        buffered = trial.run("buffered", VERSIONS, METHODS[method], **everybody)
    start, end = synchronous[0][1], synchronous[-1][1]
    level = start + SHARE * (end - start)
    times = {"synchronous": reached(synchronous, level), "buffered": reached(buffered, level)}
    about = {"method": method, "seed": seed, "start": start, "end": end, "buffered_end": buffered[-1][1]}
    return about | {"seconds": times, "curves": {"synchronous": synchronous, "buffered": buffered}}


def ratio(run: Mapping[str, Any]) -> float | None:
    """The buffered schedule's time as a share of the synchronous one's."""
    synchronous, buffered = run["seconds"]["synchronous"], run["seconds"]["buffered"]
    return None if buffered is None else buffered / synchronous


def rows(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/results/rounds.md."""
    lines = []
    for run in runs:
        share = ratio(run)
        seconds = run["seconds"]
        lines.append(
            [
                run["method"],
                str(run["seed"]),
                f"{100 * run['start']:.1f}",
                f"{100 * run['end']:.1f}",
                f"{seconds['synchronous']:.0f}",
                "not reached" if seconds["buffered"] is None else f"{seconds['buffered']:.0f}",
                "-" if share is None else f"{share:.2f}",
                f"{100 * run['buffered_end']:.1f}",
            ]
        )
    columns = ["method", "seed", "start %", "synchronous end %", "synchronous s", "asynchronous s", "ratio"]
    return table([*columns, "asynchronous end %"], lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The curves of all runs, a panel for each method."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(run["method"] for run in runs))
    figure = Figure(figsize=(3.2 * len(methods), 2.6), layout="constrained")
    for panel, method in zip(figure.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        for run in (run for run in runs if run["method"] == method):
            for colour, (schedule, curve) in zip(("tab:blue", "tab:orange"), run["curves"].items(), strict=True):
                label = schedule if run["seed"] == runs[0]["seed"] else None
                seconds, values = zip(*curve, strict=True)
                panel.plot(seconds, [100 * value for value in values], colour, lw=1, label=label)
        panel.set(title=method, xlabel="virtual seconds", ylabel="accuracy in %")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--methods", default=",".join(METHODS))
    command.add_argument("--seeds", type=integers, default=[0, 1, 2])
    command.add_argument("--figure", type=Path, help="write the curves to this SVG file")
    options = command.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(tiny.MODEL, tiny.PRETRAINED)
    runs: list[dict[str, Any]] = []
    for method in options.methods.split(","):
        for seed in options.seeds:
            runs.append(compared(method, seed, backbone))
            print(rows(runs[-1:]).splitlines()[-1], flush=True)
            write(options.json, runs)
    if options.figure is not None:
        draw(runs, options.figure)
    print(rows(runs))
    known = [share for share in map(ratio, runs) if share is not None]
    print(f"{len(known)} of {len(runs)} reached it; mean ratio {fmean(known):.2f}")


if __name__ == "__main__":
    main()
