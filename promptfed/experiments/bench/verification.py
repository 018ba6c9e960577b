"""Computes a cell of a bench again from its stored results, and compares both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from promptfed.experiments.bench.entries import BenchEntry
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Job, Runner
from promptfed.experiments.protocols.protocols import Trial
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones


class Verdict(BaseModel):
    """Whether a repeated run has the same results. ``apart``: the largest difference of two accuracies (fraction)."""

    label: str
    seed: int
    trial: str
    same_backbone: bool
    same_data: bool
    same_state: bool
    apart: float

    def holds(self, tolerance: float) -> bool:
        """Whether backbone and data are the same, and accuracies differ by at most ``tolerance``."""
        return self.same_backbone and self.same_data and self.apart <= tolerance


def read_runs(path: Path) -> list[BenchRun]:
    """The runs of a bench's folder, or of its ``results.json``.

    Raises:
        CommandError: there are no runs.
    """
    file = path / "results.json" if path.is_dir() else path
    try:
        runs = [BenchRun.model_validate(run) for run in json.loads(file.read_text())["runs"]]
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        reason = why(error) if isinstance(error, OSError) else "it is no results.json of `promptfed bench`"
        raise CommandError(f"{file} cannot be read: {reason}", Exit.BAD_INPUT) from None
    if not runs:
        raise CommandError(f"{file} holds no runs", Exit.BAD_INPUT)
    return runs


def chosen(runs: Sequence[BenchRun], label: str | None, seed: int | None, trial: str | None) -> BenchRun:
    """The run of a cell; of several, the fastest one.

    Raises:
        CommandError: there is no such run.
    """
    fitting = [
        run
        for run in runs
        if (label is None or run.label == label)
        and (seed is None or run.seed == seed)
        and (trial is None or run.trial == trial)
    ]
    if not fitting:
        known = sorted({f"{run.label}, seed {run.seed}, trial {run.trial}" for run in runs})
        more = f" and {len(known) - 6} more" if len(known) > 6 else ""
        raise CommandError(f"there is no such run; there are: {'; '.join(known[:6])}{more}", Exit.BAD_INPUT)
    return min(fitting, key=lambda run: run.wall_seconds)


def verify(run: BenchRun, device: str = "cpu", allow_backbone: AllowedBackbones = False) -> Verdict:
    """Repeat a run in a temporary folder, and compare.

    Raises:
        CommandError: it cannot be run here: data are missing, or the run was stored without its spec.
    """
    if not run.spec or not run.clients:
        raise CommandError("the run was kept without its spec or its clients: it cannot be run again", Exit.BAD_INPUT)
    sites = tuple(TypeAdapter(Site).validate_python(client) for client in run.clients)
    spec: dict[str, Any] = dict(run.spec)
    job = Job(BenchEntry(run.label, spec["method"]), run.seed, Trial(run.trial, {}, sites), spec)
    with tempfile.TemporaryDirectory() as folder:
        again = Runner(Path(folder), 1, device, allow_backbone).run(job)
    return Verdict(
        label=run.label,
        seed=run.seed,
        trial=run.trial,
        same_backbone=again.backbone == run.backbone,
        same_data=again.data == run.data,
        same_state=again.state_hash == run.state_hash,
        apart=_apart(run, again),
    )


def _apart(kept: BenchRun, again: BenchRun) -> float:
    """The largest difference of two accuracies (fraction); 1 if other clients or test sets were measured."""
    new, old = ({(row.round, row.client, row.split): row.accuracy for row in run.accuracies} for run in (again, kept))
    if set(new) != set(old):
        return 1.0
    return max((abs(new[key] - value) for key, value in old.items()), default=0.0)
