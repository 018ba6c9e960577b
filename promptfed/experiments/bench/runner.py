"""A protocol run for several methods and seeds, one file per finished federation: it goes on where it stopped."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from promptfed.experiments.bench.entries import Entry, RawSpec
from promptfed.experiments.bench.provenance import data_hash, provenance
from promptfed.experiments.bench.results import JsonObject, Run, read_run, write_json
from promptfed.experiments.protocols.label_spaces import forget_names
from promptfed.experiments.protocols.protocols import Protocol, Trial
from promptfed.experiments.protocols.setting import Setting
from promptfed.experiments.simulation.simulation import simulate
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import FederationResult
from promptfed.shared.canonical import canonical_json
from promptfed.shared.clip import Backbone
from promptfed.shared.data import DataError
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.outcomes import Outcomes
from promptfed.shared.spec.spec import BackboneSpec, FederationSpec, TrainingSpec, merged

FORMAT = 3  # of a run's file: another number makes it be run again


@dataclass(frozen=True)
class Job:
    """One federation to run: an entry under a seed in one trial of the protocol."""

    entry: Entry
    seed: int
    trial: Trial
    spec: RawSpec

    @cached_property
    def resolved(self) -> FederationSpec:
        """The spec with nothing left open. Raises CommandError if it cannot be run."""
        return resolve(self.spec)

    @property
    def key(self) -> str:
        """Names the result: the same spec and sites under the same protocol have the same."""
        # Words for a domain came later: sites without any keep the key that they had.
        sites = [
            {key: value for key, value in asdict(site).items() if (key, value) != ("domain", None)}
            for site in self.trial.sites
        ]
        text = canonical_json([FORMAT, self.spec, sites, *(["swapped"] if self.trial.swap_prompts else [])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The job in words, for progress and errors."""
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
    steps: int | None = None  # of a client in its whole training, in the place of a number of rounds
    evaluations: int = 1  # of a federation, beside the one before its first round

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns, in order."""
        return self.protocol.columns(self.setting)

    def jobs(self) -> list[Job]:
        """In an order in which every method has been seen early: by seed, then by entry.

        Raises:
            CommandError: a spec that cannot be run, or data that cannot be opened.
        """
        forget_names()
        jobs, sources = [], SharedSources()
        for seed in self.seeds:
            for entry in self.entries:
                for trial in self.protocol.trials(self.setting, seed, entry.personal):
                    if sum(site.role == "trainer" for site in trial.sites) >= entry.least_clients:
                        jobs.append(Job(entry, seed, trial, self._spec(entry, seed, trial, sources)))
        return jobs

    def _spec(self, entry: Entry, seed: int, trial: Trial, sources: SharedSources) -> RawSpec:
        """Unless it says otherwise: each data set's own template, everybody asked, ``evaluations`` beside the first."""
        added = {name: value for name, value in trial.spec.items() if value is not None}
        raw = entry.spec(merged({"name": "bench", "template": None, "seed": seed} | added, dict(self.base)), self.m)
        trainers = sum(site.role == "trainer" for site in trial.sites)
        draft = resolve(raw)
        rounds = draft.rounds
        if self.steps is not None:
            rounds = rounds_of(self.steps, draft.training, trial, sources)
            raw = raw | {"rounds": rounds}
        everybody = {} if raw.get("participation") else {"participation": {"min_clients": trainers}}
        every = math.ceil(rounds / self.evaluations)
        return merged({"evaluation": {"every": every}, **everybody}, raw)


@dataclass
class Runner:
    """Runs jobs in ``out``. All share one backbone, one feature cache, and each data set opened once."""

    out: Path
    pool: int = 1
    device: str = "cpu"
    allow_backbone: bool = False
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _sources: SharedSources = field(default_factory=SharedSources)

    def path(self, job: Job) -> Path:
        """The job's file, which is there once it has been run."""
        return self.out / "runs" / f"{job.key}.json"

    def look_at_data(self, jobs: Sequence[Job]) -> None:
        """Open all data of ``jobs``, before minutes of work end at a picture that cannot be read.

        Raises:
            CommandError: what is wrong with any of it, told at once.
        """
        wanted = {(uri, role) for job in jobs for site in job.trial.sites for uri, role in site.uris()}
        problems: dict[str, None] = {}
        for uri, role in sorted(wanted):
            try:
                self._sources.open(uri, role)
            except DataError as error:
                problems[str(error)] = None
        if problems:
            raise CommandError(" ".join(problems), Exit.BAD_INPUT)

    def run_each(self, jobs: Sequence[Job], progress: Callable[[int, int, Job], None]) -> list[Run]:
        """Every job's run, in order; ``progress`` as of `run_all`.

        Raises:
            CommandError: a federation that cannot be run. What was finished before stays.
        """
        runs = []
        for done, job in enumerate(jobs):
            progress(done, len(jobs), job)
            runs.append(self.run(job))
        return runs

    def run(self, job: Job) -> Run:
        """The job's run: read where there is one, else run and written.

        Raises:
            CommandError: the federation cannot be run, with the job's name.
        """
        path = self.path(job)
        if path.exists():
            # Another entry or protocol may have run this very spec with these very sites under names of its own.
            return read_run(path).model_copy(update={"label": job.entry.label, "trial": job.trial.name})
        backbone = self._backbone(job.resolved.backbone)
        try:
            simulated = simulate(
                job.resolved,
                job.trial.sites,
                pool=self.pool,
                backbone=backbone,
                features=self.out / "features",
                sources=self._sources,
                swap_prompts=job.trial.swap_prompts,
            )
        except CommandError as error:
            raise CommandError(f"{job.title}: {error}", error.exit) from None
        run = self._run_of(job, simulated, backbone)
        write_json(path, run)
        return run

    def _backbone(self, named: BackboneSpec) -> Backbone:
        key = canonical_json(named.model_dump())
        if key not in self._backbones:
            self._backbones[key] = open_backbone(named, allow_backbone=self.allow_backbone, device=self.device)
        return self._backbones[key]

    def _steps_of(self, job: Job, simulated: FederationResult) -> float:
        """Of a client that is asked in every round, in one phase of each, in the mean over the trainers."""
        training = job.resolved.training
        trainers = (self._sources.open(site.data) for site in job.trial.sites if site.role == "trainer")
        return simulated.round * fmean(_steps(training, len(source.train)) for source in trainers)

    def _run_of(self, job: Job, simulated: FederationResult, backbone: Backbone) -> Run:
        sources = {site.name: self._sources.open(site.data, site.role) for site in job.trial.sites}
        sources |= {
            f"{site.name}/{name}": self._sources.open(uri)
            for site in job.trial.sites
            for name, uri in site.tests.items()
        }
        return Run(
            label=job.entry.label,
            seed=job.seed,
            trial=job.trial.name,
            spec=simulated.spec,
            clients=[asdict(site) for site in job.trial.sites],
            accuracies=simulated.accuracies(),
            rounds=simulated.round,
            costs=costs(simulated.reports) | {"steps": self._steps_of(job, simulated)},
            measured=measured(simulated.reports),
            wall_seconds=round(simulated.wall_seconds, 3),
            setup_seconds=round(simulated.setup_seconds, 3),
            state_hash=simulated.state_hash,
            backbone=backbone.fingerprint,
            data=data_hash(sources),
            provenance=provenance().model_dump(),
            outcomes=[_rounded(one) for one in simulated.outcomes],
        )


def rounds_of(steps: int, training: TrainingSpec, trial: Trial, sources: SharedSources) -> int:
    """The rounds in which a client with the trial's mean number of images takes ``steps`` optimizer steps a phase.

    Raises:
        CommandError: data cannot be opened.
    """
    try:
        counts = [len(sources.open(site.data).train) for site in trial.sites if site.role == "trainer"]
    except DataError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    return math.ceil(steps / fmean(_steps(training, count) for count in counts))


def _steps(training: TrainingSpec, images: int) -> int:
    """Of one phase of a round."""
    return training.epochs * math.ceil(images / training.batch_size)


def _rounded(outcomes: Outcomes) -> Outcomes:
    """With confidences to six places: a file holds one for each image."""
    return replace(outcomes, confidence=tuple(round(one, 6) for one in outcomes.confidence))


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


def measured(reports: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """What the method measured at the coordinator, phase by phase, such as PLAN's attention shares."""
    return [
        {"round": report["round"], "phase": phase["phase"], **phase["measured"]}
        for report in reports
        for phase in report["phases"]
        if any(phase["measured"].values())
    ]


def run_all(
    bench: Bench,
    runner: Runner,
    progress: Callable[[int, int, Job], None],
    begin: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> list[Run]:
    """Every job's run, in order; ``progress`` receives how many are done, how many there are, and which comes next.

    ``begin`` receives all jobs, before anything is written or run.

    Raises:
        CommandError: a federation that cannot be run. What was finished before stays.
    """
    jobs = bench.jobs()
    begin(jobs)
    _make_folder(runner.out)
    runner.look_at_data([job for job in jobs if not runner.path(job).exists()])
    return runner.run_each(jobs, progress)


def _make_folder(out: Path) -> None:
    try:
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot use {out}: {error.strerror}", Exit.BAD_INPUT) from None
