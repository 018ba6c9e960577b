"""What a GPU changes, measured in at most ten minutes: docs/results/gpu.jsonl and docs/results/gpu.md.

    python -m benchmarks.gpu                                          # all parts, each in a process with a time limit
    python -m benchmarks.gpu --parts steps features                   # some of them
    python -m benchmarks.gpu --page                                   # writes docs/results/gpu.md
    python -m benchmarks.gpu --device cpu --smoke --out smoke.jsonl   # all parts on the embedded backbone

It needs promptfed and this repository, but no network and no weights: those of ViT-B/16, L/14 and SigLIP SO400M are
random, and words stand in for the tokens of SigLIP's tokenizer. Each case is written as a line of JSON as soon as it is
measured; the last line of a case counts. Cases that were skipped for lack of time are listed. Parts, by their worth:

  methods     every registered method on ViT-B/16: seconds of a client's task, peak memory, and, within seconds
              of their own, the distance of the state from that of the same run on the CPU
  steps       a step of PromptFL with 10, 100 and 1,000 classes and one of PLAN, each beside a plain open_clip loop
  features    image features per second against the bare tower (`benchmarks.features`)
  twice       two runs with `deterministic: true`: the same bits
  clients     four clients of one process that share a device and a backbone: the same state at once and in turn
  crews       two processes on one device, each with a backbone, as `promptfed simulate --engine ray` starts them
  hundred     a hundred clients, a tenth in each round, beside one: memory, and how busy the device is in the rounds
  precision   fp32, TF32 and bfloat16 on each backbone: time, memory, loss
  memory      a device that is too small for a step holds fewer images' activations at once: the same state but for
              rounding; if it has no room at all, the failure is named, and the run continues from where it stopped
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.features import Precision, rate
from benchmarks.harness import DOCS, machine, table
from benchmarks.step import Task, make_task
from promptfed.client_service.training.trainer import TaskWork
from promptfed.console.progress import Snapshot
from promptfed.experiments.cluster.crew import Assignment, Share, work
from promptfed.experiments.cluster.run import Conductor
from promptfed.experiments.simulation.preparation import prepare
from promptfed.experiments.simulation.run_folder import RunFolder
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import LocalFederation, Processes, Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, shape_of
from promptfed.shared.clip.towers.text import PromptTokenizer
from promptfed.shared.data import open_source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import Failed, PromptfedError
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.shared.tensors import Tensors

BATCH = 32
NO_RATE = 1e-30
PROMPTS = {"promptfl": 16, "plan": 8}  # vectors: those of the methods' papers
REPEATS = 3
KEY = "a5" * 32
MIB = 1 << 20
PAGE = DOCS / "results" / "gpu.md"
NUMBERS = PAGE.with_suffix(".jsonl")
TROUBLE = ("failed", "skipped")
BEGIN, END = "<!-- tables -->\n", "<!-- end of the tables -->\n"
Case = Mapping[str, Any]
TITLES = {
    "Steps beside a plain loop": "steps",
    "Clients at once": "clients",
    "Crews on one device": "crews",
    "A hundred clients": "hundred",
    "The same bits again": "twice",
    "Precision": "precision",
    "Too little memory": "memory",
    "Image features": "features",
}
MODELS = {"ViT-B-16": "random", "ViT-L-14": "random", "ViT-SO400M-14-SigLIP": "random"}
SMALL = {"promptfed-tiny": "embedded"}
STYLES = ("painting", "sketch", "neon", "chalk")  # of the clients in turn: some methods need several domains
DATA = "symbols:{style}?topic=faces&per_class=1&test_per_class=1"  # six images for each client
HUNDRED = "symbols:blueprint?topic=faces&per_class={images}&test_per_class=50&partition=iid&clients=100"
SHORT = {"m": 4, "mst_steps": 4}  # a context that fits beside the names into SigLIP's sixteen positions; few steps
BUDGETS = {  # seconds for one backbone
    "methods": 125.0,
    "steps": 48.0,
    "features": 55.0,
    "twice": 12.0,
    "clients": 15.0,
    "crews": 20.0,
    "hundred": 55.0,
    "precision": 10.0,
    "memory": 20.0,
}
REFERENCES = 25.0  # of the methods' seconds, for runs on the CPU alone
BACKBONES = {"precision": 3}  # how many of the backbones a part runs with; the others with the first
STARTING = 20.0  # further seconds until a part is ended: for its start and its last case
SOME = ("promptfl", "plan", "fedotp")  # with text prompts, with prompts in both towers, and with patch features
REPEATABLE = {"deterministic": True}  # where hashes are compared: the fastest kernels of a GPU add in any order
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")


class WordTokenizer:
    """Each word is a token, numbered by a checksum: it stands in for a tokenizer that would have to be downloaded."""

    pad_token_id = 1  # SigLIP's, which also ends a text
    all_special_ids = (1,)

    def __init__(self, vocabulary: int):
        self.tokenizer = self  # as open_clip wraps those of transformers
        self._numbers = vocabulary - 2

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        ids = torch.full((len(texts), context_length), self.pad_token_id)
        for row, text in zip(ids, texts, strict=True):
            words = text.replace(".", " .").split()[: context_length - 1]
            row[: len(words)] = torch.tensor([2 + zlib.crc32(word.encode()) % self._numbers for word in words])
        return ids


def with_words(backbone: Backbone) -> Backbone:
    """The backbone, with `WordTokenizer` where its own tokenizer is one of the Hugging Face hub."""
    text = backbone.open_clip_config["model_cfg"].get("text_cfg", {})
    if text.get("hf_tokenizer_name"):
        words = WordTokenizer(int(text["vocab_size"]))
        backbone.__dict__["_tokenizer"] = PromptTokenizer(words, backbone.context_length)
    return backbone


class PlainLoop:
    """Prompt learning as it is written in an hour: open_clip's own blocks, every position of every class, no cache.

    ``deep``: prompts enter every block of both towers, as in PLAN; else a context is trained alone.
    """

    def __init__(self, task: Task, length: int, deep: bool, autocast: bool):
        backbone, device = task.kept.backbone, task.kept.backbone.device
        self._model, self._deep, self._autocast, self._m = backbone.model, deep, autocast, length
        prompts = backbone.class_prompts(task.names, length)
        self._start, self._ends = prompts.start, prompts.end.to(device)
        self._rows = torch.arange(len(prompts), device=device)
        with torch.no_grad():
            self._words = self._model.token_embedding(prompts.ids.to(device))
        blocks = backbone.text_layers if deep else 1
        draws = torch.Generator().manual_seed(0)
        sizes = [(blocks, length, backbone.d_t), *([(backbone.vision_layers, length, backbone.d_v)] if deep else [])]
        self.trained = [(0.02 * torch.randn(size, generator=draws)).to(device).requires_grad_() for size in sizes]
        self._images, self._labels = task.kept.pixels.to(device), task.kept.classes.to(device)
        self._optimizer = torch.optim.SGD(self.trained, lr=NO_RATE, momentum=0.9)
        self._scaler = torch.amp.GradScaler(device.type, enabled=autocast)

    def _replaced(self, rows: Tensor, prompts: Tensor, at: int, behind: int) -> Tensor:
        return torch.cat([rows[:, :at], prompts.to(rows.dtype).expand(len(rows), -1, -1), rows[:, behind:]], 1)

    def _text(self) -> Tensor:
        model, prompts, end = self._model, self.trained[0], self._start + self._m
        rows = self._replaced(self._words, prompts[0], self._start, end) + model.positional_embedding
        for number, block in enumerate(model.transformer.resblocks):
            if 0 < number < len(prompts):
                rows = self._replaced(rows, prompts[number], self._start, end)
            rows = block(rows, attn_mask=model.attn_mask)
        pooled: Tensor = model.ln_final(rows)[self._rows, self._ends] @ model.text_projection
        return pooled

    def _features(self) -> Tensor:
        tower = self._model.visual
        if not self._deep:
            with torch.no_grad():
                found: Tensor = tower(self._images)
                return found
        rows = tower._embeds(self._images)
        for number, block in enumerate(tower.transformer.resblocks):
            rows = block(self._replaced(rows, self.trained[1][number], 1, 1 if number == 0 else 1 + self._m))
        pooled: Tensor = tower._pool(rows)[0] @ tower.proj
        return pooled

    def steps(self, count: int) -> None:
        """``count`` steps on the batch."""
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        with torch.autocast(self._images.device.type, torch.float16, enabled=self._autocast):
            cosines = F.normalize(self._features(), dim=-1) @ F.normalize(self._text(), dim=-1).T
            loss = F.cross_entropy(self._model.logit_scale.exp() * cosines, self._labels)
        self._optimizer.zero_grad()
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.step(self._optimizer)
        self._scaler.update()


def step_task(backbone: Backbone, name: str, classes: int) -> Task:
    """A task on one batch whose features and pixels are on the device."""
    task = make_task(backbone, "promptfl", classes, BATCH)
    kept = task.kept
    task.kept = replace(kept, encoded=kept.encoded.to(backbone.device), pixels=kept.pixels.to(backbone.device))
    if name == "plan":  # without the global prediction, which no plain loop has
        method = make_method({"name": name, "m": PROMPTS[name], "alpha": 0.0})
        server = ServerContext(task.training, shape_of(backbone), task.names, (), 0, 1)
        state = method.initial_state_with(backbone, server, initial_draws(0))
        payload = {spec.name: state[spec.name] for spec in method.phases(1, 1)[0].down}
        task = replace(task, method=method, payload=payload)
    return task


def beside(backbones: Mapping[Precision, Backbone], name: str, classes: int, counts: tuple[int, int]) -> dict[str, Any]:
    """Seconds and peak memory (MiB) of a step: the method's with each backbone, a plain loop's, that with autocast.

    counts: the steps of one of our tasks, whose recording is part of them, and those of a plain loop.
    """
    found: dict[str, Any] = {}

    def measured(way: str, run: Callable[[], object], count: int, device: torch.device) -> None:
        found[f"{way}, s"] = round(_seconds(run, device) / count, 5)
        if device.type == "cuda":
            found[f"{way}, MiB"] = torch.cuda.max_memory_allocated() >> 20

    for precision, backbone in backbones.items():
        task = step_task(backbone, name, classes)
        kept = replace(task.kept, steps=counts[0])
        ours = "ours" if precision == "fp32" else f"ours {precision}"
        measured(ours, partial(task.train, kept, NO_RATE, backbone), counts[0], backbone.device)
        for way, autocast in {"plain": False, "plain fp16": True}.items():
            if precision == "fp32" and (not autocast or backbone.device.type == "cuda"):
                loop = PlainLoop(task, PROMPTS[name], name == "plan", autocast)
                measured(way, partial(loop.steps, counts[1]), counts[1], backbone.device)
    found["ratio"] = round(found["ours, s"] / found["plain, s"], 3)
    if "plain fp16, s" in found and "ours bf16, s" in found:
        found["ratio of 16 bits"] = round(found["ours bf16, s"] / found["plain fp16, s"], 3)
    return found


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs after one that does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


@dataclass(frozen=True)
class Limit:
    """Bytes of device memory that a process may allocate. None, for the CPU: every step raises OutOfMemoryError."""

    bytes: int | None

    def apply(self) -> None:
        """Apply the limit to this process."""
        if self.bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.bytes / total)
            return

        def fail(*_: object) -> dict[str, float]:
            raise torch.OutOfMemoryError("as if the device were full")

        TaskWork.train = fail  # type: ignore[method-assign, assignment]


def _play(assignment: Assignment, limit: Limit | None, answers: Any) -> None:
    if limit is not None:
        limit.apply()
    try:
        answers.put(work(assignment))
    except PromptfedError as error:
        answers.put(error)


@dataclass
class SpawnedCrews:
    """Crews as child processes of this one."""

    limit: Limit | None = None
    _context: Any = field(default_factory=lambda: multiprocessing.get_context("spawn"))
    _processes: list[Any] = field(default_factory=list)
    _outcomes: list[Outcomes] = field(default_factory=list)
    _answered: int = 0

    def begin(self, assignments: Sequence[Assignment]) -> None:
        """Start a process for each assignment."""
        self._answers = self._context.Queue()
        for assignment in assignments:
            process = self._context.Process(target=_play, args=(assignment, self.limit, self._answers), daemon=True)
            process.start()
            self._processes.append(process)

    def check(self) -> None:
        """PromptfedError if a process has failed or died."""
        while self._processes and not self._answers.empty():
            self._take(self._answers.get())
        dead = [process for process in self._processes if process.exitcode not in (None, 0)]
        if dead:
            raise Failed(f"a crew's process ended with {dead[0].exitcode}")

    def _take(self, answer: Any) -> None:
        if isinstance(answer, PromptfedError):
            raise answer
        self._outcomes += answer
        self._answered += 1

    def outcomes(self, seconds: float) -> list[Outcomes]:
        """Wait for all crews, ``seconds`` for each answer; their outcomes."""
        while self._answered < len(self._processes):
            self._take(self._answers.get(timeout=seconds))
        return self._outcomes

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()
            process.join()


@dataclass
class Watched:
    """MiB that all processes used on the device at most (None on a CPU), and at which times it worked for how much."""

    most: int | None = None
    busy: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds, percent of the moment before

    def busy_between(self, start: float, end: float) -> float | None:
        """The mean percentage; None on a CPU."""
        found = [percent for moment, percent in self.busy if start <= moment <= end]
        return round(statistics.mean(found), 1) if found else None


@contextmanager
def _watched(device: str) -> Iterator[Watched]:
    """What the device did in the block."""
    watched = Watched()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            watched.most = max(watched.most or 0, (total - free) // MIB)
            watched.busy.append((time.monotonic(), torch.cuda.utilization()))

    thread = threading.Thread(target=watch, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield watched
    finally:
        ended.set()
        if device != "cpu":
            thread.join()


def conducted(
    spec: dict[str, Any], sites: Sequence[Site], crews: int, device: str, folder: Path, limit: Limit | None = None
) -> tuple[FederationResult, int | None]:
    """Run or continue a federation in ``folder``; its result, and the largest device memory in MiB (None on a CPU).

    Raises:
        PromptfedError: the federation did not finish.
    """
    wanted, initial, _ = prepare(spec, sites, 1, None, allow_backbone=False)
    spawned = SpawnedCrews(limit)
    with Processes(folder) as processes, LocalFederation(processes, folder) as local, _watched(device) as watched:
        conductor = Conductor(local, spawned, RunFolder(folder, KEY, lasting=True), None, lambda snapshot: None)
        try:
            result = conductor.conduct(wanted, initial, tuple(sites), Share(crews, 1, device, False))
        finally:
            spawned.stop()
    return result, watched.most


def page(numbers: Mapping[str, Any], text: str) -> str:
    """The page ``text`` with the tables of the numbers between its two marks."""
    about = numbers["about"]
    lines = [
        f"Device: {about['device']}, torch {about['torch']}; {numbers['seconds']:.0f} s, all calls together. "
        "ViT-B-16 unless another is named.",
        "",
    ]
    if numbers["smoke"]:
        lines += ["This was a smoke run on the embedded backbone: it shows that all parts run, and nothing else.", ""]
    parts = numbers["parts"]
    lines += ["## Methods", "", _methods(parts.get("methods", {})), ""]
    for title, name in TITLES.items():
        lines += [f"## {title}", "", _cases(parts[name]), ""] if parts.get(name) else []
    before, _, after = text.partition(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + after.partition(END)[2]


def read(path: Path) -> dict[str, Any]:
    """The numbers of `page` from the lines of ``path``: of a case the last one counts."""
    numbers: dict[str, Any] = {"parts": {}, "seconds": 0.0}
    for line in map(json.loads, path.read_text().splitlines()):
        if "case" in line:
            numbers["parts"].setdefault(line.pop("part"), {})[line.pop("case")] = line
        else:
            numbers |= line | {"seconds": numbers["seconds"] + line.get("seconds", 0.0)}
    return numbers


def _methods(cases: Mapping[str, Case]) -> str:
    rows = []
    for name, case in sorted(cases.items()):
        if name.endswith(" cpu"):
            continue
        cpu = cases.get(f"{name} cpu", {})
        cells = [case.get("task_seconds"), case.get("peak_mib"), cpu.get("task_seconds"), cpu.get("distance")]
        rows.append([_named(name, case, cpu), *map(_cell, cells)])
    return table(["method", "task, s", "peak, MiB", "task on the CPU, s", "state apart"], rows)


def _named(name: str, *cases: Case) -> str:
    """A case without the backbone of most, and why it has no figures."""
    remark = next((str(case[key]) for case in cases for key in TROUBLE if key in case), "")
    return name.removeprefix("ViT-B-16 ") + (f" ({remark})" if remark else "")


def _cases(cases: Mapping[str, Case]) -> str:
    keys = sorted(
        {key for case in cases.values() for key in case}
        - {"loss", "pictures", "state_hash", "state_hashes", "weights_mib", *TROUBLE}
    )
    rows = [[_named(name, case), *(_cell(case.get(key)) for key in keys)] for name, case in cases.items()]
    return table(["case", *keys], rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    text = str(value).replace("|", "/")
    return text[:19] + "..." if text.startswith("sha256:") else text


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
            except (PromptfedError, RuntimeError, ValueError) as error:
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
    options = METHODS[chosen["name"]].Hyper.model_fields
    chosen = {key: value for key, value in SHORT.items() if key in options} | chosen
    spec = {
        "name": "gpu",
        "method": chosen,
        "class_names": list(open_source(uris[0]).class_names),
        "rounds": 2,
        "seed": 1,
        "backbone": {"model": model, "pretrained": pretrained, "precision": precision},
        "training": {key: value for key, value in training.items() if key not in METHODS[chosen["name"]].ignores},
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
    """The largest difference of two entries over the largest of their tensor in ``wanted``; 0 for empty states."""
    filled = [name for name in wanted if wanted[name].numel()]
    differences = [float((state[name].double() - wanted[name].double()).abs().max()) for name in filled]
    sizes = [float(wanted[name].double().abs().max()) for name in filled]
    return max((apart / max(size, 1e-6) for apart, size in zip(differences, sizes, strict=True)), default=0.0)


def methods(part: Part) -> None:
    """Run every method on the device, then on the CPU while time is left."""
    results: dict[tuple[str, str], FederationResult] = {}

    def on_device(model: str, name: str) -> dict[str, Any]:
        results[model, name], figures = part.run(model, name, part.device)
        return figures

    def on_cpu(model: str, name: str) -> dict[str, Any]:
        reference, figures = part.run(model, name, "cpu")
        apart = distance(results[model, name].state, reference.state)
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


def hundred(part: Part) -> None:
    """One client and a hundred, each with 32 images: a tenth of them trains in each of three rounds.

    Tasks have one step, or 80: as many as 500 images in batches of 32 have in 5 epochs.
    """
    alone: dict[str, int] = {}

    def measure(model: str, method: str, count: int, training: dict[str, int]) -> dict[str, Any]:
        data = HUNDRED.format(images=70 if part.smoke else 528)
        sites = [Site(f"site-{number}", f"{data}&client={number}") for number in range(count)]
        spec, _ = plan(model, part.models[model], method, count, training=dict(training))
        spec |= {"rounds": 3, "participation": {"fraction": 0.1 if count > 1 else 1.0}, "evaluation": {"every": 3}}
        running: list[float] = []

        def progress(snapshot: Snapshot) -> None:
            if snapshot.state != "enrolling":
                running.append(time.monotonic())

        backbone = part.backbone(model, part.device)
        _begin(part.device)
        began = time.monotonic()
        with _watched(part.device) as watched:
            result = simulate(
                spec, sites, pool=8, backbone=backbone, sources=part._sources, device=part.device, progress=progress
            )
        running = running or [began, time.monotonic()]  # too quick to be told of
        peak, began, ended = _peak(part.device), running[0], running[-1]
        figures = {
            "seconds": round(result.wall_seconds, 2),
            "rounds, s": round(ended - began, 2),
            "busy in rounds, %": watched.busy_between(began, ended),
            "peak_mib": peak,
        }
        if peak is not None:
            figures["of one client's"] = round(peak / alone.setdefault(method, peak), 3)
        return figures

    long = {"batch_size": 4, "epochs": 1 if part.smoke else 10}
    for model in part.models:
        for count in (1, 12 if part.smoke else 100):
            for steps, training in {"1 step": {"batch_size": BATCH}, "80 steps": long}.items():
                part.case(f"{model} promptfl {count}, {steps}", partial(measure, model, "promptfl", count, training))
        for count in (1, 12 if part.smoke else 100):
            part.case(f"{model} plan {count}, 1 step", partial(measure, model, "plan", count, {"batch_size": BATCH}))


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
        reference, figures = part.run(model, "plan", part.device, training=training)
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
                figures["distance_on_a_small_device"] = distance(small.state, reference.state)
            try:
                conducted(spec, sites, 1, part.device, folder / "none", none)
            except PromptfedError as error:
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
    count = 64 if part.smoke else 2048
    for precision in PRECISIONS:
        part.case(f"{model} {precision}", partial(rate, count, model, part.models[model], part.device, precision))


def steps(part: Part) -> None:
    """A step beside that of a plain loop, in this process."""
    model = next(iter(part.models))
    precisions: tuple[Precision, ...] = ("fp32",) if part.device == "cpu" else ("fp32", "bf16")
    backbones: dict[Precision, Backbone] = {
        precision: part.backbone(model, part.device, precision) for precision in precisions
    }
    counts = (2, 2) if part.smoke else (100, 10)
    for classes in (10, 30) if part.smoke else (10, 100, 1000):
        part.case(f"{model} promptfl {classes}", partial(beside, backbones, "promptfl", classes, counts))
    part.case(f"{model} plan 10", partial(beside, backbones, "plan", 10, (counts[1], counts[1])))


PARTS: dict[str, Callable[[Part], None]] = {
    "methods": methods,
    "steps": steps,
    "features": features_per_second,
    "twice": twice,
    "clients": clients,
    "crews": crews,
    "hundred": hundred,
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
        PAGE.write_text(page(read(options.out), PAGE.read_text()))
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
