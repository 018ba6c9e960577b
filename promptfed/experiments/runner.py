"""A protocol run for several methods and seeds, one file per finished federation: it goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from promptfed.experiments.entries import Entry
from promptfed.experiments.protocols import Protocol, Setting, Trial
from promptfed.experiments.provenance import data_hash, provenance
from promptfed.experiments.simulation import simulate
from promptfed.sdk.backbone import open_backbone
from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.simulated import Accuracy, Simulated
from promptfed.shared.clip import Backbone
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec import merged
from promptfed.shared.tensors import canonical_json

FORMAT = 2  # of a run's file: another number makes it be run again
VARIANT = "@"
# What a run's file holds that tables and plots are made of.
RESULT = frozenset({"label", "seed", "trial", "rounds", "accuracies", "costs", "wall_seconds", "setup_seconds"})


@dataclass(frozen=True)
class Job:
    """One federation to run: an entry under a seed in one trial of the protocol."""

    entry: Entry
    seed: int
    trial: Trial
    spec: dict[str, Any]

    @property
    def key(self) -> str:
        """Names the result: the same spec and sites under the same protocol have the same."""
        sites = [asdict(site) for site in self.trial.sites]
        text = canonical_json([FORMAT, self.spec, sites])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.entry.label}, seed {self.seed}" + ("" if self.trial.name == "all" else f", {self.trial.name}")


@dataclass(frozen=True)
class Bench:
    """Everything that a bench is to run. ``base`` is laid under every entry's spec."""

    protocol: Protocol
    entries: Sequence[Entry]
    setting: Setting
    seeds: Sequence[int]
    base: Mapping[str, Any] = field(default_factory=dict)
    m: int | None = None

    def jobs(self) -> list[Job]:
        """In an order in which every method has been seen early: by seed, then by entry.

        Raises:
            CommandError: a spec that cannot be run, or data that cannot be opened.
        """
        jobs = []
        for seed in self.seeds:
            for entry in self.entries:
                for trial in self.protocol.trials(self.setting, seed, entry.personal):
                    jobs.append(Job(entry, seed, trial, self._spec(entry, seed, trial)))
        return jobs

    def _spec(self, entry: Entry, seed: int, trial: Trial) -> dict[str, Any]:
        """Each data set's own template, everybody asked, evaluated at the start and the end, unless told otherwise."""
        given = {name: value for name, value in trial.spec.items() if value is not None}
        raw = entry.spec(merged({"name": "bench", "template": None, "seed": seed} | given, dict(self.base)), self.m)
        trainers = sum(site.role == "trainer" for site in trial.sites)
        everybody = {} if raw.get("participation") else {"participation": {"min_clients": trainers}}
        return merged({"evaluation": {"every": resolve_spec(raw).rounds}, **everybody}, raw)


@dataclass
class Runner:
    """Runs jobs in ``out``. All share one backbone, one feature cache, and each data set opened once."""

    out: Path
    pool: int = 1
    device: str = "cpu"
    allow_backbone: bool = False
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _sources: SharedSources = field(default_factory=SharedSources)

    def run(self, job: Job) -> dict[str, Any]:
        """The job's result: read where it has been run, else run and written.

        Raises:
            CommandError: the federation cannot be run, with the job's name.
        """
        path = self.out / "runs" / f"{job.key}.json"
        if path.exists():
            # Another entry or protocol may have run this very spec with these very sites under names of its own.
            return read_result(path) | {"label": job.entry.label, "trial": job.trial.name}
        backbone = self._backbone(job.spec)
        try:
            found = simulate(
                job.spec,
                job.trial.sites,
                pool=self.pool,
                backbone=backbone,
                features=self.out / "features",
                sources=self._sources,
            )
        except CommandError as error:
            raise CommandError(f"{job.title}: {error}", error.exit) from None
        result = self._result(job, found)
        write_json(path, result)
        return result

    def _backbone(self, spec: dict[str, Any]) -> Backbone:
        key = canonical_json(resolve_spec(spec).backbone.model_dump())
        if key not in self._backbones:
            self._backbones[key] = open_backbone(spec, allow_backbone=self.allow_backbone, device=self.device)
        return self._backbones[key]

    def _result(self, job: Job, found: Simulated) -> dict[str, Any]:
        sources = {site.name: self._sources.open(site.data) for site in job.trial.sites}
        sources |= {
            f"{site.name}/{name}": self._sources.open(uri)
            for site in job.trial.sites
            for name, uri in site.tests.items()
        }
        return {
            "label": job.entry.label,
            "seed": job.seed,
            "trial": job.trial.name,
            "spec": found.spec,
            "clients": [asdict(site) for site in job.trial.sites],
            "accuracies": [asdict(one) for one in found.accuracies()],
            "rounds": found.rounds,
            "costs": costs(found.reports),
            "measured": measured(found.reports),
            "wall_seconds": round(found.wall_seconds, 3),
            "setup_seconds": round(found.setup_seconds, 3),
            "state_hash": found.state_hash,
            "backbone": found.backbone_fingerprint,
            "data": data_hash(sources),
            "provenance": provenance(),
        }


def costs(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a client spends in a round: bytes each way and seconds of training, in the mean over rounds and clients.

    ``trained``: the numbers that it optimises, in the mean over clients, median over rounds.
    """
    rounds = [report for report in reports if report["phases"]]
    if not rounds:
        return {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0, "trained": 0.0}
    first = [len(report["phases"][0]["asked"]) for report in rounds]
    per_client = {
        key: fmean(
            sum(phase[key] for phase in report["phases"]) / asked for report, asked in zip(rounds, first, strict=True)
        )
        for key in ("bytes_up", "bytes_down")
    }
    seconds, trained = (
        [_sum(report, metric) / asked for report, asked in zip(rounds, first, strict=True)]
        for metric in ("train_seconds", "trained_parameters")
    )
    return {**per_client, "seconds": fmean(seconds), "trained": median(trained)}


def _sum(report: Mapping[str, Any], metric: str) -> float:
    updates = (update for phase in report["phases"] for update in phase["updates"])
    return float(sum(update["metrics"].get(metric, 0.0) for update in updates))


def measured(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the method measured at the coordinator, phase by phase, such as PLAN's attention shares."""
    return [
        {"round": report["round"], "phase": phase["phase"], **phase["measured"]}
        for report in reports
        for phase in report["phases"]
        if any(phase["measured"].values())
    ]


def scores_of(
    protocol: Protocol, results: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float] | None]:
    """Columns by variant ("" is the method's own classifier) for one entry and seed, and zero-shot's where known."""
    rows = {result["trial"]: _last(result) for result in results}
    variants = sorted({one.split.partition(VARIANT)[2] for found in rows.values() for one in found})
    scores = {
        variant: protocol.scores({trial: list(_of(found, variant)) for trial, found in rows.items()}, _accuracy)
        for variant in variants
    }
    plain = {trial: list(_of(found, "")) for trial, found in rows.items()}
    if any(one.zero_shot is None for found in plain.values() for one in found):
        return scores, None
    return scores, protocol.scores(plain, _zero_shot)


def _last(result: Mapping[str, Any]) -> list[Accuracy]:
    found = [Accuracy(**one) for one in result["accuracies"]]
    return [one for one in found if one.round == result["rounds"]]


def _of(rows: Sequence[Accuracy], variant: str) -> Iterator[Accuracy]:
    for one in rows:
        split, _, name = one.split.partition(VARIANT)
        if name == variant:
            yield replace(one, split=split)


def _accuracy(one: Accuracy) -> float:
    return one.accuracy


def _zero_shot(one: Accuracy) -> float | None:
    return one.zero_shot


def run_all(bench: Bench, runner: Runner, told: Callable[[int, int, Job], None]) -> list[dict[str, Any]]:
    """Every job's result, in order; ``told`` hears how many are done, how many there are, and which comes next.

    Raises:
        CommandError: a federation that cannot be run. What was finished before stays.
    """
    jobs = bench.jobs()
    _usable(runner.out)
    results = []
    for done, job in enumerate(jobs):
        told(done, len(jobs), job)
        results.append(runner.run(job))
    return results


def _usable(out: Path) -> None:
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot use {out}: {error.strerror}", Exit.BAD_INPUT) from None


def read_result(path: Path) -> dict[str, Any]:
    """A run's file. Raises CommandError where it is not one."""
    try:
        found = json.loads(path.read_text())
        missing = RESULT - set(found) if isinstance(found, dict) else RESULT
        if missing:
            raise ValueError(f"it holds no {min(missing)}")
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: remove it to run it again ({error})", Exit.BAD_INPUT) from None
    return dict(found)


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", Exit.BAD_INPUT) from None
