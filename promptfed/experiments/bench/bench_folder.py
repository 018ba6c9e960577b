"""The folder of a bench: which bench it belongs to, and which of its federations are finished."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from promptfed.experiments.bench.results import JsonObject, read_run
from promptfed.experiments.bench.runner import Bench, Job, Runner
from promptfed.experiments.bench.tables import TableRow
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.pace import duration
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

BENCH_FILE, RESULTS_FILE = "bench.json", "results.json"
GROWS = ("targets",)  # fields of a setting that may grow later, as methods and seeds may


def identity(bench: Bench) -> JsonObject:
    """The settings that must be the same for all runs of a folder, so that one table can compare them."""
    setting = {name: value for name, value in asdict(bench.setting).items() if name not in GROWS}
    spec = {"spec": dict(bench.base), "m": bench.m, "steps": bench.steps}
    plain: JsonObject = json.loads(json.dumps({"protocol": bench.protocol.name, "setting": setting} | spec))
    return plain


def claim(out: Path, bench: Bench) -> None:
    """Make ``out`` the bench's folder.

    Raises:
        CommandError: it belongs to another bench, with the differences, or cannot be written.
    """
    own, there = identity(bench), _identity_in(out)
    if there is not None:
        differs = [name for name in there if there[name] != own[name]]
        if differs:
            what = "; ".join(f"{name} was {_short(there[name])}, is {_short(own[name])}" for name in differs)
            text = f"{out} holds another bench ({what}): give --out another folder, or run that one again"
            raise CommandError(text, Exit.BAD_INPUT)
    text = json.dumps(own, indent=1, ensure_ascii=False)
    try:  # whole, since another bench may begin in this folder at the same time, or this one be killed
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write_whole(out / BENCH_FILE, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise CommandError(f"cannot write {out / BENCH_FILE}: {why(error)}", Exit.BAD_INPUT) from None


def _identity_in(out: Path) -> JsonObject | None:
    """The identity of the folder's bench; None for a new folder."""
    for name in (BENCH_FILE, RESULTS_FILE):
        path = out / name
        if not path.exists():
            continue
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if name == BENCH_FILE:
                return {key: said[key] for key in ("protocol", "setting", "spec", "m", "steps")}
            return {"protocol": said["protocol"]}  # of a version that kept no more
        except (OSError, ValueError, KeyError, TypeError):
            raise CommandError(f"{path} cannot be read: give --out another folder", Exit.BAD_INPUT) from None
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


def left(jobs: Sequence[Job], runner: Runner) -> tuple[list[Job], float | None]:
    """The unfinished jobs, and an estimate of their seconds from the finished ones (None without any)."""
    seconds: dict[str, list[float]] = {}
    open_jobs = []
    for job in jobs:
        path = runner.path(job)
        if path.exists():
            run = read_run(path)
            seconds.setdefault(job.entry.label, []).append(run.wall_seconds + run.setup_seconds)
        else:
            open_jobs.append(job)
    everybody = [value for values in seconds.values() for value in values]
    if not everybody:
        return open_jobs, None
    return open_jobs, sum(fmean(seconds.get(job.entry.label, everybody)) for job in open_jobs)


def resumed(jobs: Sequence[Job], runner: Runner) -> str | None:
    """A sentence about finished jobs and the time for the rest; None if no job is finished."""
    rest, seconds = left(jobs, runner)
    if seconds is None:
        return None
    done = f"{len(jobs) - len(rest)} of {len(jobs)} federations are done in {runner.out}"
    return f"{done}; the other {len(rest)} will take about {duration(seconds)}" if rest else f"{done}: all of them"


def results_csv(rows: Sequence[TableRow], seeds: Sequence[int]) -> bytes:
    """The table as CSV, one accuracy (fraction) in each line. Rows of papers have no seed."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "seed", "column", "accuracy"])
    for row in rows:
        numbers: Sequence[int | str] = seeds if len(row.scores) == len(seeds) else [""] * len(row.scores)
        for seed, scores in zip(numbers, row.scores, strict=True):
            writer.writerows([row.label, seed, column, repr(value)] for column, value in scores.items())
    return text.getvalue().encode()
