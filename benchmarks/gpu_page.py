"""Makes docs/results/gpu.md from the numbers of `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import DOCS, table

PAGE = DOCS / "results" / "gpu.md"
HEAD = """# On a GPU

What a GPU changes, measured by one command of at most ten minutes. It needs promptfed and this repository, no network
and no weights: those of ViT-B/16, L/14 and SigLIP SO400M are drawn at random, since neither time nor memory depends on
their values.

```
python -m benchmarks.gpu --json docs/results/gpu.json
python -m benchmarks.gpu --page
```
"""
NONE = """
**No GPU was available so far: there are no figures.** Without one, the tests run all parts of the command on a CPU and
the embedded backbone (`python -m benchmarks.gpu --device cpu --smoke`); a step that raises torch's error stands in for
a device that is too small.
"""
Case = Mapping[str, Any]


def page(numbers: Mapping[str, Any] | None) -> str:
    """The whole page. ``numbers`` None: no GPU was available."""
    if numbers is None:
        return HEAD + NONE
    about = numbers["about"]
    lines = [HEAD, f"Device: {about['device']}, torch {about['torch']}; {numbers['seconds']:.0f} s in all.", ""]
    if numbers["smoke"]:
        lines += ["This was a smoke run on the embedded backbone: it shows that all parts run, and nothing else.", ""]
    parts = numbers["parts"]
    lines += ["## Methods", "", _methods(parts.get("methods", {})), ""]
    for title, name in TITLES.items():
        lines += [f"## {title}", "", _cases(parts.get(name, {})), ""]
    return "\n".join(lines)


TITLES = {
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
