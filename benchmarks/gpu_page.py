"""Makes docs/results/gpu.md from the numbers of `benchmarks.gpu`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import DOCS, table

PAGE = DOCS / "results" / "gpu.md"
NUMBERS = PAGE.with_suffix(".jsonl")
HEAD = """# On a GPU

What a GPU changes, measured by one command of at most ten minutes. It needs promptfed and this repository, no network
and no weights: those of ViT-B/16, L/14 and SigLIP SO400M are drawn at random, since neither time nor memory depends on
their values.

```
python -m benchmarks.gpu                        # or --parts methods steps: each case is kept as soon as it is measured
python -m benchmarks.gpu --page
```
"""
NONE = """
**The command has not run on a GPU since the first run below.** The tests run all its parts on a CPU and the embedded
backbone, and play every method on a device that behaves like a GPU: tensors of two places that meet raise, memory that
shares itself cannot be pinned, and no step may wait for the device.
"""
FIRST = """
## The first run

On 2026-11-26, on one H100 (80 GB, 16 CPU cores, torch 2.11), of commit 7368013d.

- No method ran. Each failed at its first image feature: memory that shares itself, an expanded picture, was pinned.
- With a copy before the pinning, methods ran, and a step was slower than one of a plain open_clip loop. Seconds of a
  step of PromptFL, ViT-B/16, batch 32, 16 context vectors, image features cached:

| classes | plain loop, fp32 | plain loop, autocast fp16 | promptfed, fp32 | promptfed, bf16 |
|--:|--:|--:|--:|--:|
| 10 | 0.035 | 0.031 | 0.094 | |
| 100 | 0.043 | 0.024 | 0.098 | 0.095 |
| 1,000 | 0.361 | 0.087 | 0.091 | |

- Of a step of 98 ms, 8.6 ms were kernels; the rest launched about 1,800 of them.
- Image features: 229 pictures a second, where the bare tower reaches 917 (fp32, batches of 32).
- Memory: 1.2 GB with 100 classes and 1.8 GB with 1,000, where the plain loop takes 3.2 and 21 GB.
- A federation of two rounds with 12 images took about 9 s, of which tasks were 0.2 s.

Changed since, and not yet measured on a GPU:

- Every method's training, classifier and evaluation run on the stand-in for a GPU and equal the CPU's.
- FedOTP does not ask the device during a step which of its transport plans still move.
- A file of weights is loaded without drawing those that it replaces: 0.45 s of a CPU instead of 1.25 s for ViT-B/16.
  Beside the towers, a federation like the one above takes 0.6 s of a CPU, and 1.5 s if it is a process's first one,
  half a second of it for the weights' fingerprint (CPU seconds of one thread, imports and loading not counted).
"""
Case = Mapping[str, Any]


def page(numbers: Mapping[str, Any] | None) -> str:
    """The whole page. ``numbers`` None: no GPU was available."""
    if numbers is None:
        return HEAD + NONE + FIRST
    about = numbers["about"]
    lines = [HEAD, f"Device: {about['device']}, torch {about['torch']}; {numbers['seconds']:.0f} s in all.", ""]
    if numbers["smoke"]:
        lines += ["This was a smoke run on the embedded backbone: it shows that all parts run, and nothing else.", ""]
    parts = numbers["parts"]
    lines += ["## Methods", "", _methods(parts.get("methods", {})), ""]
    for title, name in TITLES.items():
        lines += [f"## {title}", "", _cases(parts.get(name, {})), ""]
    return "\n".join(lines) + FIRST


def read(path: Path) -> dict[str, Any] | None:
    """The numbers of `page` from the lines of ``path``: of a case the last one counts. None: no such file."""
    if not path.exists():
        return None
    numbers: dict[str, Any] = {"parts": {}, "seconds": 0.0}
    for line in map(json.loads, path.read_text().splitlines()):
        if "case" in line:
            numbers["parts"].setdefault(line.pop("part"), {})[line.pop("case")] = line
        else:
            numbers |= line
    return numbers


TITLES = {
    "Steps beside a plain loop": "steps",
    "Clients at once": "clients",
    "Crews on one device": "crews",
    "The same bits again": "twice",
    "Precision": "precision",
    "Too little memory": "memory",
    "Image features": "features",
}


def _methods(cases: Mapping[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        if name.endswith(" cpu"):
            continue
        cpu = cases.get(f"{name} cpu", {})
        cells = [case.get("task_seconds"), case.get("peak_mib"), cpu.get("task_seconds"), cpu.get("distance")]
        rows.append([name, *map(_cell, cells), _remark(case) or _remark(cpu)])
    columns = ["backbone, method", "task, s", "peak, MiB", "task on the CPU, s", "state apart", "remark"]
    return table(columns, rows)


def _cases(cases: Mapping[str, Case]) -> str:
    keys = sorted({key for case in cases.values() for key in case})
    rows = [[name, *(_cell(case.get(key)) for key in keys)] for name, case in cases.items()]
    return table(["case", *keys], rows)


def _remark(case: Case) -> str:
    return str(case.get("failed") or case.get("skipped") or "")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    text = str(value).replace("|", "/")
    return text[:19] + "..." if text.startswith("sha256:") else text
