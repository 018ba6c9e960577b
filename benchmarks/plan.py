"""What PLAN costs: a step of each phase beside its floor, the memory of its options, and the numbers that travel.

    python -m benchmarks.plan --json benchmarks/plan.json
    python -m benchmarks.plan --only memory --json benchmarks/plan.json     # one part; the others stay as they are

Floor of a step: one prompted forward and backward through both towers, and in `prompts` one forward of the teacher for
each image (once a round, here in the only step). The step is the method's own `train` on one batch: tokens, teacher's
texts, losses, aggregators, optimizer, update. Ways are interleaved, CPU time of one thread, medians.

Plain towers: open_clip's own blocks one after another, all text positions; the same gradient, for comparison.

Memory is the growth of the process' peak over one step of `prompts`, in a fresh process for each option; the errors are
those of the update against the one in float32 without options.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.step import class_names
from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.base import ClientContext, ClientInfo, Phase, ServerContext
from promptfed.shared.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors

PARTS = ("time", "memory", "numbers")
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "checkpoint 8": {"checkpoint": 8},
    "checkpoint 2": {"checkpoint": 2},
    "bf16": {"autocast": "bf16"},
    "bf16, checkpoint 8": {"autocast": "bf16", "checkpoint": 8},
}
COMPARED = ("plan", "fedmaple", "promptfl", "fedvpt", "fedvpt_deep")
VIT_B_16 = BackboneShape(d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77, patch_size=16)
PAPER_CLIENTS = 3  # leave-one-domain-out with four domains


@dataclass
class Batch:
    """A client whose images are one batch, in memory."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        raise AssertionError("only round 1 looks at frozen features")

    def images(self, indices: Tensor) -> Tensor:
        return self.pixels[indices]

    def first(self, count: int) -> Batch:
        return Batch(self.pixels[:count], self.labels[:count])


@dataclass
class Bench:
    """A backbone with random weights, a batch, and a state of PLAN with K clients' prompts."""

    backbone: Backbone
    context: ClientContext
    batch: Batch
    state: Tensors
    phases: dict[str, Phase]
    server: ServerContext

    def step(self, phase: str, **options: Any) -> Tensors:
        """The update after one step of ``phase``."""
        method = make_method({"name": "plan", **options})
        context = replace(self.context, phase=phase)
        payload = method.payload(self.state, self.phases[phase], self.server.clients[0], self.server)
        return method.train(context, payload, {}).update

    def floor(self, phase: str) -> None:
        """The towers' share of it, through the same encoders."""
        text, visual = self._leaves()
        classes = self.backbone.class_prompts(self.context.class_names, text.shape[1])
        if phase == "prompts":
            with torch.no_grad():
                self.backbone.encode_images_prompted(self._pixels, visual)
        features = self.backbone.encode_images_prompted(self._pixels, visual)
        torch.autograd.backward((features @ self.backbone.encode_prompts(text[0], classes, deep=text[1:]).T).sum())

    def plain(self, phase: str) -> None:
        """The same through open_clip's blocks one after another."""
        text, visual = self._leaves()
        if phase == "prompts":
            with torch.no_grad():
                plain_images(self.backbone, self._pixels, visual)
        classes = self.backbone.class_prompts(self.context.class_names, text.shape[1])
        found = self.backbone.encode_prompts(text[0], classes, deep=text[1:], path="plain")
        torch.autograd.backward((plain_images(self.backbone, self._pixels, visual) @ found.T).sum())

    @property
    def _pixels(self) -> Tensor:
        return self.batch.pixels

    def _leaves(self) -> tuple[Tensor, Tensor]:
        return tuple(self.state[f"{kind}_prompts"].clone().requires_grad_() for kind in ("text", "visual"))  # type: ignore[return-value]


def plain_images(backbone: Backbone, images: Tensor, prompts: Tensor) -> Tensor:
    """`(B, d_e)` of images under prompts `(depth, m, d_v)`, all rows through all blocks."""
    visual, m = backbone.model.visual, prompts.shape[1]
    rows = visual.conv1(images).flatten(2).transpose(1, 2)
    rows = torch.cat([visual.class_embedding.expand(len(rows), 1, -1), rows], dim=1) + visual.positional_embedding
    rows = visual.ln_pre(torch.cat([rows[:, :1], prompts[0].expand(len(rows), -1, -1), rows[:, 1:]], dim=1))
    for number, block in enumerate(visual.transformer.resblocks):
        if 0 < number < len(prompts):
            rows = torch.cat([rows[:, :1], prompts[number].expand(len(rows), -1, -1), rows[:, 1 + m :]], dim=1)
        rows = block(rows)
    return F.normalize(visual.ln_post(rows[:, 0]) @ visual.proj, dim=-1)


def make_bench(arguments: argparse.Namespace, names: tuple[str, ...] = ()) -> Bench:
    """``names`` instead of ``arguments.classes`` names of one to five tokens."""
    torch.set_num_threads(1)
    backbone = load_backbone(arguments.model, "random")
    draws = torch.Generator().manual_seed(0)
    names = names or tuple(class_names(arguments.classes, lambda name: len(backbone.embed_words(name))))
    pixels = torch.randn(arguments.batch, 3, *backbone.image_size, generator=draws)
    batch = Batch(pixels, torch.randint(len(names), (arguments.batch,), generator=draws))
    training = TrainingSpec(batch_size=arguments.batch, learning_rate=0.0015)
    context = ClientContext(backbone, names, "a photo of a {}.", training, "a", None, (), 2, 20, "prompts", 0, batch)
    clients = tuple(ClientInfo(f"client-{k}", "trainer", arguments.batch, names) for k in range(arguments.clients))
    server = ServerContext(training, shape_of(backbone), names, clients, 0, 20)
    method = make_method({"name": "plan"})
    state = method.initial_state(server, draws)
    for kind in ("text", "visual"):
        one = state[f"{kind}_prompts"]
        state[f"client_{kind}_prompts"] = torch.randn(arguments.clients, *one.shape, generator=draws) * 0.02
    return Bench(backbone, context, batch, state, {phase.name: phase for phase in method.phases(2, 20)}, server)


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure_time(bench: Bench, repeats: int, plain_repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seconds: dict[str, dict[str, list[float]]] = {phase: {} for phase in bench.phases}
    few = bench.batch.first(2)
    small = replace(bench, batch=few, context=replace(bench.context, train=few))
    for phase in bench.phases:  # warming up
        small.step(phase)
        small.floor(phase)
    for repeat in range(repeats):
        for phase in bench.phases:
            ways: dict[str, Callable[[], Any]] = {
                "step": partial(bench.step, phase),
                "floor": partial(bench.floor, phase),
            }
            if repeat < plain_repeats:
                ways["plain"] = partial(bench.plain, phase)
            for way, work in ways.items():
                seconds[phase].setdefault(way, []).append(round(cpu_seconds(work), 3))
        print(f"repeat {repeat + 1} of {repeats}: {seconds}", file=sys.stderr, flush=True)
    for phase, runs in seconds.items():
        medians = {way: statistics.median(values) for way, values in runs.items()}
        over = medians["step"] / medians["floor"] - 1
        found[phase] = {"runs": runs, "median": medians, "over_floor": round(over, 4)}
    return found


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in OPTIONS:
        command = [sys.executable, "-m", "benchmarks.plan", "--option", name, "--model", arguments.model]
        command += ["--batch", str(arguments.batch), "--classes", str(arguments.classes)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 (our own command)
        found[name] = json.loads(out)
        print(f"{name}: {found[name]['mib']} MiB", file=sys.stderr, flush=True)
    wanted = found["float32"].pop("update")
    for one in found.values():
        update = one.pop("update", wanted)
        one["errors"] = {key: _relative(update[key], wanted[key]) for key in wanted}
    return found


def _relative(found: list[float], wanted: list[float]) -> float:
    """‖a − b‖ / ‖b‖ of what a step changed."""
    a, b = torch.tensor(found), torch.tensor(wanted)
    return float((a - b).norm() / b.norm())


def one_option(bench: Bench, name: str) -> None:
    """Run as a process of its own: peak growth in MiB, CPU seconds, and the update's change, as JSON."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    update = bench.step("prompts", **OPTIONS[name])
    seconds = time.process_time() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    change = {key: (tensor - bench.state[key]).flatten().tolist() for key, tensor in update.items()}
    print(json.dumps({"mib": round((after - before) / 1024), "seconds": round(seconds, 2), "update": change}))


def count_numbers() -> dict[str, Any]:
    """Numbers per client and round for ViT-B/16, by phase and direction, from the methods' own declarations."""
    server = ServerContext(TrainingSpec(), VIT_B_16, None, (), 0, 20)
    found: dict[str, Any] = {}
    for name in COMPARED:
        method = make_method({"name": name, **({"m": 8} if name == "promptfl" else {})})
        dims = method.dims(server) | {"K": PAPER_CLIENTS}
        phases = {
            phase.name: {way: sum(torch.Size(spec.resolve(dims)).numel() for spec in specs)
                         for way, specs in (("down", phase.down), ("up", phase.up))}
            for phase in method.phases(2, 20)
        }  # fmt: skip
        found[name] = {"phases": phases, "both_ways": sum(sum(ways.values()) for ways in phases.values())}
    return found


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: getattr(arguments, name) for name in ("model", "batch", "classes", "clients", "repeats")},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16", help="any open_clip model with a vision transformer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--classes", type=int, default=65, help="OfficeHome has 65")
    parser.add_argument("--clients", type=int, default=PAPER_CLIENTS, help="K")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plain-repeats", type=int, default=1, help="steps through plain towers")
    parser.add_argument("--only", choices=PARTS, help="measure this part")
    parser.add_argument("--option", choices=OPTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write results and provenance here, beside what other parts wrote")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.option is not None:
        one_option(make_bench(arguments), arguments.option)
        return
    found: dict[str, Any] = {}
    if arguments.only in (None, "time"):
        found["time"] = measure_time(make_bench(arguments), arguments.repeats, arguments.plain_repeats)
    if arguments.only in (None, "memory"):
        found["memory"] = measure_memory(arguments)
    if arguments.only in (None, "numbers"):
        found["numbers"] = count_numbers()
    print(json.dumps(found, indent=1))
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        about = {part: provenance(arguments) for part in found}
        known["provenance"] = known.get("provenance", {}) | about
        arguments.json.write_text(json.dumps(known | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
