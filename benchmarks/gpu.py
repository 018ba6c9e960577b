"""What a GPU changes, measured in at most ten minutes: docs/results/gpu.jsonl and docs/results/gpu.md.

    python -m benchmarks.gpu                                          # all parts, each in a process with a time limit
    python -m benchmarks.gpu --parts steps features                   # some of them
    python -m benchmarks.gpu --page                                   # writes docs/results/gpu.md
    python -m benchmarks.gpu --device cpu --smoke --out smoke.jsonl   # all parts on the embedded backbone

It needs promptfed and this repository, but no network and no weights: those of ViT-B/16, L/14 and SigLIP SO400M are
random, and words stand in for the tokens of SigLIP's tokenizer. Each case is written as a line of JSON as soon as it is
measured; the last line of a case counts. Cases that were skipped for lack of time are listed. Parts, by their worth:

  methods     every registered method on ViT-B/16 and L/14: seconds of a client's task, peak memory, and, within seconds
              of their own, the distance of the state from that of the same run on the CPU
  steps       a step of PromptFL with 10, 100 and 1,000 classes and one of PLAN, each beside a plain open_clip loop
  features    image features per second against the bare tower (`benchmarks.features`)
  twice       two runs with `deterministic: true`: the same bits
  clients     four clients of one process that share a device and a backbone: the same state at once and in turn
  crews       two processes on one device, each with a backbone, as `promptfed simulate --engine ray` starts them
  precision   fp32, TF32 and bfloat16 on each backbone: time, memory, loss
  memory      a device that is too small for a step holds fewer images' activations at once: the same state but for
              rounding; if it has no room at all, the failure is named, and the run continues from where it stopped
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.features import rate
from benchmarks.gpu_crews import Limit, conducted
from benchmarks.gpu_page import NUMBERS, PAGE, page, read
from benchmarks.gpu_steps import beside, with_words
from benchmarks.harness import machine
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone
from promptfed.sdk.errors import CommandError
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods import METHODS
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.shared.tensors import Tensors

MODELS = {"ViT-B-16": "random", "ViT-L-14": "random", "ViT-SO400M-14-SigLIP": "random"}
SMALL = {"promptfed-tiny": "embedded"}
STYLES = ("painting", "sketch", "neon", "chalk")  # of the clients in turn: some methods need several domains
DATA = "symbols:{style}?topic=faces&per_class=1&test_per_class=1"  # six images for each client
SHORT = {"m": 4, "mst_steps": 4}  # a context that fits beside the names into SigLIP's sixteen positions; few steps
BUDGETS = {  # seconds for one backbone
    "methods": 95.0,
    "steps": 50.0,
    "features": 20.0,
    "twice": 25.0,
    "clients": 20.0,
    "crews": 30.0,
    "precision": 15.0,
    "memory": 30.0,
}
REFERENCES = 25.0  # of the methods' seconds, for runs on the CPU alone
BACKBONES = {"methods": 2, "precision": 3}  # how many of the backbones a part runs with; the others with the first
STARTING = 12.0  # further seconds until a part is ended: for its start and its last case
SOME = ("promptfl", "plan", "fedotp")  # with text prompts, with prompts in both towers, and with patch features
REPEATABLE = {"deterministic": True}  # where hashes are compared: the fastest kernels of a GPU add in any order
MIB = 1 << 20
Precision = Literal["fp32", "fp16", "bf16"]


@dataclass
class Part:
    """A part that runs until ``until`` (monotonic seconds). Each case is also a line of the file ``out``."""

    device: str
    models: Mapping[str, str]
    until: float
    out: Path
    smoke: bool
    name: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    _backbones: dict[tuple[str, str, str], Backbone] = field(default_factory=dict)
    _sources: SharedSources = field(default_factory=SharedSources)

    @cached_property
    def place(self) -> Path:
        """The folder of the feature caches."""
        return Path(tempfile.mkdtemp(prefix="promptfed-gpu-", dir=self.out.parent))

    def case(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Call ``measure`` if time is left, and write its figures, its failure, or that it was skipped."""
        if time.monotonic() > self.until:
            outcome: dict[str, Any] = {"skipped": "no time was left"}
        else:
            try:
                outcome = measure()
            except (CommandError, RuntimeError, ValueError) as error:
                outcome = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        self.figures[name] = outcome
        append(self.out, {"part": self.name, "case": name} | outcome)

    def backbone(self, model: str, device: str, precision: Precision = "fp32") -> Backbone:
        """The backbone on this device in this precision, which is loaded once."""
        key = model, device, precision
        if key not in self._backbones:
            spec = BackboneSpec(model=model, pretrained=self.models[model], precision=precision)
            self._backbones[key] = with_words(open_backbone(spec, allow_backbone=False, device=device))
        return self._backbones[key]

    def run(
        self, model: str, method: str | dict[str, Any], device: str, *, clients: int = 2, pool: int = 1, **changes: Any
    ) -> tuple[FederationResult, dict[str, Any]]:
        """Run a federation of two rounds; its result, and memory (MiB) and seconds of the second round's tasks."""
        precision = changes.pop("precision", "fp32")
        backbone = self.backbone(model, device, precision)
        spec, sites = plan(model, self.models[model], method, clients, precision, **changes)
        _begin(device)
        features = FeatureCache(self.place / f"features-{device.replace(':', '-')}-{precision}")
        result = simulate(
            spec, sites, pool=pool, backbone=backbone, features=features, sources=self._sources, device=device
        )
        return result, {"peak_mib": _peak(device), "weights_mib": _weights(backbone), **_task(result)}


def plan(
    model: str, pretrained: str, method: str | dict[str, Any], clients: int, precision: str = "fp32", **changes: Any
) -> tuple[dict[str, Any], list[Site]]:
    """The spec and clients of the federation that all parts run."""
    threads = min(8, os.cpu_count() or 1)
    training = {"batch_size": 4, "epochs": 1, "threads": threads, **changes.pop("training", {})}
    uris = [DATA.format(style=STYLES[n % len(STYLES)]) for n in range(clients)]
    chosen: dict[str, Any] = {"name": method} if isinstance(method, str) else method
    known = METHODS[chosen["name"]].Hyper.model_fields
    chosen = {key: value for key, value in SHORT.items() if key in known} | chosen
    spec = {
        "name": "gpu",
        "method": chosen,
        "class_names": list(open_source(uris[0]).class_names),
        "rounds": 2,
        "seed": 1,
        "backbone": {"model": model, "pretrained": pretrained, "precision": precision},
        "training": training,
        "participation": {"min_clients": clients},
        "evaluation": {"every": 2},
        **changes,
    }
    return spec, [Site(f"site-{n}", uri) for n, uri in enumerate(uris)]


def _begin(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int | None:
    return None if device == "cpu" else round(torch.cuda.max_memory_allocated() / MIB)


def _weights(backbone: Backbone) -> int:
    sizes: list[int] = [value.numel() * value.element_size() for value in backbone.model.parameters()]
    return round(sum(sizes) / MIB)


def _task(result: FederationResult) -> dict[str, Any]:
    """Figures of the last round, as means over clients. The first round also fills caches, so it does not count."""
    last = result.round_reports[-1]
    updates = [update for phase in last.phases for update in phase.updates]
    clients = {update.client for update in updates}
    seconds = sum(update.metrics.get("train_seconds", 0.0) for update in updates)
    losses = [update.metrics["loss"] for update in updates if "loss" in update.metrics]
    return {
        "task_seconds": round(seconds / max(1, len(clients)), 4),
        "loss": round(sum(losses) / len(losses), 6) if losses else None,
        "state_hash": result.state_hash,
    }


def distance(state: Tensors, wanted: Tensors) -> float:
    """The largest difference of two entries over the largest entry of ``wanted``; 0 for empty states."""
    filled = [name for name in wanted if wanted[name].numel()]
    differences = [float((state[name].double() - wanted[name].double()).abs().max()) for name in filled]
    sizes = [float(wanted[name].double().abs().max()) for name in filled]
    return max(differences, default=0.0) / max(max(sizes, default=0.0), 1e-30)


def methods(part: Part) -> None:
    """Run every method on the device, then on the CPU while time is left."""
    results: dict[tuple[str, str], FederationResult] = {}

    def on_device(model: str, name: str) -> dict[str, Any]:
        results[model, name], figures = part.run(model, name, part.device)
        return figures

    def on_cpu(model: str, name: str) -> dict[str, Any]:
        wanted, figures = part.run(model, name, "cpu")
        apart = distance(results[model, name].state, wanted.state)
        return {"task_seconds": figures["task_seconds"], "distance": apart}

    end = part.until
    part.until -= REFERENCES
    for model in part.models:
        for name in sorted(METHODS):
            part.case(f"{model} {name}", partial(on_device, model, name))
    part.until = end
    for model, name in list(results):
        part.case(f"{model} {name} cpu", partial(on_cpu, model, name))


def clients(part: Part) -> None:
    """Four clients in turn and at once."""
    hashes: dict[str, str] = {}

    def measure(model: str, pool: int) -> dict[str, Any]:
        result, numbers = part.run(model, "promptfl", part.device, clients=4, pool=pool, training=dict(REPEATABLE))
        in_turn = hashes.setdefault(model, result.state_hash)
        same = {"same_state_as_in_turn": result.state_hash == in_turn}
        return numbers | {"seconds": round(result.wall_seconds, 2)} | same

    for model in part.models:
        for pool in (1, 4):
            part.case(f"{model} pool {pool}", partial(measure, model, pool))


def crews(part: Part) -> None:
    """One and two processes on the device, over HTTP."""

    def measure(model: str, count: int) -> dict[str, Any]:
        spec, sites = plan(model, part.models[model], "promptfl", 4, training=dict(REPEATABLE))
        with tempfile.TemporaryDirectory(dir=part.out.parent) as folder:
            result, used = conducted(spec, sites, count, part.device, Path(folder))
        return {"seconds": round(result.wall_seconds, 2), "device_mib": used, "state_hash": result.state_hash}

    for model in part.models:
        for count in (1, 2):
            part.case(f"{model} crews {count}", partial(measure, model, count))


def twice(part: Part) -> None:
    """Run the same federation two times and compare the states."""

    def measure(model: str, name: str) -> dict[str, Any]:
        hashes = [part.run(model, name, part.device, training=dict(REPEATABLE))[0].state_hash for _ in range(2)]
        return {"state_hashes": hashes, "same": hashes[0] == hashes[1]}

    for model in part.models:
        for name in SOME[:1] if part.smoke else SOME:
            part.case(f"{model} {name}", partial(measure, model, name))


def precision(part: Part) -> None:
    """Run PLAN, which trains the image tower's prompts, and PromptFL in each precision that they have."""

    def measure(model: str, method: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return part.run(model, method, part.device, **changes)[1]

    for model in part.models:
        for name in ("plan", "promptfl"):
            case = partial(measure, model, {"name": name})
            part.case(f"{model} {name} fp32", case)
            part.case(f"{model} {name} tf32", partial(case, training={"tf32": True}))
            part.case(f"{model} {name} bf16", partial(case, precision="bf16"))
        part.case(f"{model} plan autocast", partial(measure, model, {"name": "plan", "autocast": "bf16"}))


def memory(part: Part) -> None:
    """Run clients on a device that holds the backbone but not a step, then on one without room for anything."""
    model, pretrained = next(iter(part.models.items()))
    training = {"batch_size": 32, **REPEATABLE}
    spec, sites = plan(model, pretrained, "plan", 2, training=training)

    def measure() -> dict[str, Any]:
        wanted, figures = part.run(model, "plan", part.device, training=training)
        part._backbones.clear()
        _begin(part.device)
        with tempfile.TemporaryDirectory(dir=part.out.parent) as place:
            folder, none = Path(place), Limit(None)
            for name in ("small", "none"):
                (folder / name).mkdir()
            if figures["peak_mib"] is not None:
                none = Limit((figures["weights_mib"] + 16) * MIB)
                between = Limit((figures["weights_mib"] + figures["peak_mib"]) * MIB // 2)
                small, _ = conducted(spec, sites, 1, part.device, folder / "small", between)
                figures["distance_on_a_small_device"] = distance(small.state, wanted.state)
            try:
                conducted(spec, sites, 1, part.device, folder / "none", none)
            except CommandError as error:
                failure = str(error)
            else:
                return {"failed": "nothing failed without memory", **figures}
            after, _ = conducted(spec, sites, 1, part.device, folder / "none")
        same = after.state_hash == figures["state_hash"]
        return {"failure": failure, "named": "OutOfMemoryError" in failure, "same_state_after": same, **figures}

    part.case(f"{model} plan", measure)


def features_per_second(part: Part) -> None:
    """The cache's features against the bare tower."""
    model = next(iter(part.models))
    count = 64 if part.smoke else 4096
    part.case(model, partial(rate, count, model, part.models[model], part.device))


def steps(part: Part) -> None:
    """A step beside that of a plain loop, in turn in this process."""
    model = next(iter(part.models))
    backbone, count = part.backbone(model, part.device), 2 if part.smoke else 10
    for classes in (10, 30) if part.smoke else (10, 100, 1000):
        part.case(f"{model} promptfl {classes}", partial(beside, backbone, "promptfl", classes, count))
    part.case(f"{model} plan 10", partial(beside, backbone, "plan", 10, count))


PARTS: dict[str, Callable[[Part], None]] = {
    "methods": methods,
    "steps": steps,
    "features": features_per_second,
    "twice": twice,
    "clients": clients,
    "crews": crews,
    "precision": precision,
    "memory": memory,
}


def about(device: str) -> dict[str, Any]:
    """The device and the libraries that compute on it."""
    if device == "cpu":
        return machine() | {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    driver = {"cuda": torch.version.cuda, "memory_mib": properties.total_memory // MIB}
    return machine() | {"device": properties.name, **driver}


def append(out: Path, line: Mapping[str, Any]) -> None:
    """Write one more line of JSON."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_parts(options: argparse.Namespace) -> None:
    """Run the parts for each backbone in processes, which add their cases to the file behind a line of the machine."""
    models = SMALL if options.smoke else MODELS
    append(options.out, {"about": about(options.device), "smoke": options.smoke})
    began = time.monotonic()
    for name in options.parts:
        for model in list(models)[: BACKBONES.get(name, 1)]:
            _in_process(options, name, model)
    append(options.out, {"seconds": round(time.monotonic() - began, 1)})


def _in_process(options: argparse.Namespace, name: str, model: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", name, "--model", model, "--out", str(options.out)]
    command += ["--device", options.device, *(["--smoke"] if options.smoke else [])]
    budget = options.seconds or BUDGETS[name]
    command += ["--seconds", str(budget)]
    seconds = budget + STARTING
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=seconds)  # noqa: S603 (ourselves)
        ended = "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:]
    except subprocess.TimeoutExpired:
        ended = f"ended after {seconds:.0f} s"
    if ended:
        append(options.out, {"part": name, "case": f"{model} (part)", "failed": ended})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts or one of them; 1 if the device is missing."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--out", type=Path, default=NUMBERS, help="file to which the cases are added")
    command.add_argument("--page", action="store_true", help=f"write {PAGE} from the numbers")
    command.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    command.add_argument("--smoke", action="store_true", help="the embedded backbone only")
    command.add_argument("--seconds", type=float, help="time limit of each part; by default all end within ten minutes")
    command.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="by default all")
    command.add_argument("--model", help="run one part with this backbone, in this process")
    options = command.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(read(options.out)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here: --device cpu --smoke shows that all parts run", file=sys.stderr)
        return 1
    models = SMALL if options.smoke else MODELS
    if options.model is None:
        run_parts(options)
        return 0
    name = options.parts[0]
    until = time.monotonic() + (options.seconds or BUDGETS[name])
    chosen = {options.model: models[options.model]}
    PARTS[name](Part(options.device, chosen, until, options.out, options.smoke, name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
