"""Runs a protocol for several methods and seeds, with one file per finished federation, so that it can continue.

A folder belongs to one bench: protocol, setting and spec.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from promptfed.console.output import commit
from promptfed.experiments.bench.entries import BenchEntry, RawSpec
from promptfed.experiments.bench.protocols import Protocol, Setting, Trial, forget_names
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.run_file import data_of
from promptfed.sdk.result import Accuracy, FederationResult
from promptfed.shared.canonical import canonical_json
from promptfed.shared.clip import Backbone
from promptfed.shared.data import DataError, Source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.files import write_whole
from promptfed.shared.methods import resolve_spec, with_default_backbone
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, SpecError, merged

JsonObject = dict[str, JsonValue]
VARIANT = "@"  # between the name of a test set and that of a further classifier
PACKAGES = ("promptfed", "torch", "open_clip_torch", "timm", "numpy", "pillow", "fastapi")
FORMAT = 3  # of a run's file: another number makes it be run again
BENCH_FILE = "bench.json"
GROWS = ("targets",)  # fields of a setting that may grow later, as methods and seeds may


class BenchRun(BaseModel):
    """One federation: its entry, its clients' accuracies, its costs (of a client and round), and its provenance."""

    model_config = ConfigDict(frozen=True)

    label: str
    seed: int
    trial: str
    spec: JsonObject = {}
    clients: list[JsonObject] = []
    accuracies: list[Accuracy]
    rounds: int
    costs: dict[str, float]
    wall_seconds: float
    setup_seconds: float
    state_hash: str = ""
    backbone: str = ""
    data: str = ""
    provenance: JsonObject = {}
    outcomes: list[Outcomes] = []

    def last(self) -> list[Accuracy]:
        """The accuracies after the last round."""
        return [accuracy for accuracy in self.accuracies if accuracy.round == self.rounds]


def row_label(run: BenchRun, split: str) -> str:
    """The label of the table's row: the entry's, followed by the variant that the test set's name holds."""
    variant = split.partition(VARIANT)[2]
    return f"{run.label} ({variant})" if variant else run.label


def read_run(path: Path) -> BenchRun:
    """The run in a file. Raises PromptfedError if the file holds no run."""
    try:
        return BenchRun.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        reason = SpecError.from_validation(error) if isinstance(error, ValidationError) else error
        raise BadInput(f"{path} cannot be read: remove it to run it again ({reason})") from None


def write_json(path: Path, value: BaseModel) -> None:
    """Write the fields that were set, whole or not at all. Raises PromptfedError if that fails."""
    text = json.dumps(value.model_dump(exclude_unset=True), indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {why(error)}") from None


class ResultProvenance(BaseModel):
    """Versions of packages, and the machine without its owner's name or folders."""

    python: str
    packages: dict[str, str]
    machine: dict[str, str | int | None]
    commit: str | None = None


def provenance() -> ResultProvenance:
    """The provenance of results that this process computes."""
    return ResultProvenance(
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        machine={"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
        commit=commit() or None,
    )


def data_hash(sources: dict[str, Source]) -> str:
    """SHA-256 over class names, labels and pixels of both splits of all sources, in name order of the keys."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(canonical_json([name, list(source.class_names)]).encode())
        for split in (source.train, source.test):
            for row, label in enumerate(split.labels.tolist()):
                digest.update(f"{label}|{split.digest(row)}\n".encode())
    return "sha256:" + digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """One federation to run: an entry under a seed in one trial of the protocol.

    ``chosen``: which backbone the spec has, and why, where nobody names one.
    """

    entry: BenchEntry
    seed: int
    trial: Trial
    spec: RawSpec
    chosen: str | None = None

    @property
    def key(self) -> str:
        """The name of the result, which depends only on the sites and the spec with its method's defaults of today."""
        spec = self.resolved.model_dump(mode="json", exclude_defaults=True)
        text = canonical_json([FORMAT, spec, [asdict(site) for site in self.trial.sites]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def resolved(self) -> FederationSpec:
        """The spec with its method's defaults. Raises PromptfedError if it cannot be run."""
        return resolve_spec(self.spec)

    @property
    def title(self) -> str:
        """The job in words, for progress and errors."""
        return f"{self.entry.label}, seed {self.seed}" + ("" if self.trial.name == "all" else f", {self.trial.name}")


@dataclass(frozen=True)
class Bench:
    """Everything that a bench is to run.

    ``base`` is the part of the spec that all entries share. ``evaluations`` are those after the first round's start.
    """

    protocol: Protocol
    entries: Sequence[BenchEntry]
    setting: Setting
    seeds: Sequence[int]
    base: Mapping[str, Any] = field(default_factory=dict)
    m: int | None = None
    evaluations: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns, in order."""
        return self.protocol.columns(self.setting)

    def jobs(self) -> list[Job]:
        """All jobs, by seed and then by entry, so that each method has its first results early.

        Raises:
            PromptfedError: a spec cannot be run, or data cannot be opened.
        """
        forget_names()
        jobs = []
        for seed in self.seeds:
            for entry in self.entries:
                for trial in self.protocol.trials(self.setting, seed, entry.personal):
                    if sum(site.role == "trainer" for site in trial.sites) >= entry.least_clients:
                        jobs.append(Job(entry, seed, trial, *self._spec(entry, seed, trial)))
        return jobs

    def _spec(self, entry: BenchEntry, seed: int, trial: Trial) -> tuple[RawSpec, str | None]:
        """The entry's spec, and `Job.chosen`.

        Defaults of a bench: each data set's own template, all clients asked, ``evaluations``.
        """
        added = {name: value for name, value in trial.spec.items() if value is not None}
        raw = entry.spec(merged({"name": "bench", "template": None, "seed": seed} | added, dict(self.base)), self.m)
        trainers = sum(site.role == "trainer" for site in trial.sites)
        everybody = {} if raw.get("participation") else {"participation": {"min_clients": trainers}}
        raw, chosen = with_default_backbone(raw, data_of(trial.sites))
        every = math.ceil(resolve_spec(raw).rounds / self.evaluations)
        return merged({"evaluation": {"every": every}, **everybody}, raw), chosen


Progress = Callable[[int, int, Job], None]
"""Receives how many jobs are done, how many there are, and the next one."""


@dataclass
class Runner:
    """Runs jobs and keeps their results in ``out``. Jobs share backbones, one feature cache, and opened data."""

    out: Path
    pool: int = 1
    device: str = "cpu"
    allow_backbone: AllowedBackbones = False
    new_data: bool = False  # what was computed on other data is computed again
    features: Path | None = None  # a folder that several benches share; default: in ``out``
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _hashes: dict[str, str] = field(default_factory=dict)
    _sources: SharedSources = field(default_factory=SharedSources)

    def path(self, job: Job) -> Path:
        """The file of the job's result. It exists only if the job is finished."""
        return self.out / "runs" / f"{job.key}.json"

    def look_at_data(self, jobs: Sequence[Job]) -> None:
        """Open all data of ``jobs``, so that unreadable data are found before any federation runs.

        Raises:
            PromptfedError: data cannot be opened. The text names all problems.
        """
        needed = {(uri, role) for job in jobs for site in job.trial.sites for uri, role in site.uris()}
        problems: dict[str, None] = {}
        for uri, role in sorted(needed):
            try:
                self._sources.open(uri, role)
            except DataError as error:
                problems[str(error)] = None
        if problems:
            raise BadInput(" ".join(problems))

    def run_all(self, jobs: Sequence[Job], progress: Progress) -> list[BenchRun]:
        """The runs of all jobs, in order. The data are opened before the first job is run.

        Raises:
            PromptfedError: data cannot be opened, or a federation cannot be run. Finished runs stay in the folder.
        """
        self.look_at_data([job for job in jobs if not self._is_done(job)])
        runs = []
        for done, job in enumerate(jobs):
            progress(done, len(jobs), job)
            runs.append(self.run(job))
        return runs

    def run(self, job: Job) -> BenchRun:
        """The job's result: read from its file, or computed and written.

        Raises:
            PromptfedError: the federation cannot be run. The text names the job.
        """
        path = self.path(job)
        if self._is_done(job):
            # Another entry or protocol may have run this very spec with these very sites under names of its own.
            return read_run(path).model_copy(update={"label": job.entry.label, "trial": job.trial.name})
        try:
            simulated = simulate(
                job.resolved,
                job.trial.sites,
                pool=self.pool,
                backbone=self._backbone(job),
                features=self.features or self.out / "features",
                sources=self._sources,
            )
        except PromptfedError as error:
            raise error.saying(f"{job.title}: {error}") from None
        run = self._run_of(job, simulated)
        write_json(path, run)
        return run

    def _is_done(self, job: Job) -> bool:
        """Whether the job's file has its result, of this backbone and these data; what is away is not compared.

        Raises:
            PromptfedError: it was computed with another backbone, or on other data that are not to be computed anew.
        """
        path = self.path(job)
        if not path.exists():
            return False
        uris = [uri for site in job.trial.sites for uri, _ in site.uris()]
        before = read_run(path)
        try:
            now = self._backbone(job).fingerprint
        except PromptfedError:
            now = before.backbone
        if before.backbone not in ("", now):
            text = f"{job.title}: {path} was computed with another backbone ({before.backbone}, now {now})"
            raise BadInput(f"{text}; give the same --backbone-file, or --out another folder")
        if all_drawn(uris):
            return True
        try:
            data = self._data_of(job)
        except DataError:
            return True
        if before.data in ("", data):
            return True
        if not self.new_data:
            text = f"{job.title}: the data have changed since {path} was computed (other images, or other labels)"
            raise BadInput(f"{text}; give --new-data to run it again, or --out another folder")
        return False

    def _sources_of(self, job: Job) -> dict[str, Source]:
        """The job's sources by client, and by client and test set. Raises DataError."""
        sources = {site.name: self._sources.open(site.data, site.role) for site in job.trial.sites}
        return sources | {
            f"{site.name}/{name}": self._sources.open(uri, "tests")
            for site in job.trial.sites
            for name, uri in site.tests.items()
        }

    def _data_of(self, job: Job) -> str:
        """The `data_hash` of the job's sources, which many jobs share. Raises DataError."""
        key = canonical_json([asdict(site) for site in job.trial.sites])
        if key not in self._hashes:
            self._hashes[key] = data_hash(self._sources_of(job))
        return self._hashes[key]

    def _backbone(self, job: Job) -> Backbone:
        named = job.resolved.backbone
        key = canonical_json(named.model_dump())
        if key not in self._backbones:
            self._backbones[key] = open_backbone(named, allow_backbone=self.allow_backbone, device=self.device)
        return self._backbones[key]

    def _run_of(self, job: Job, simulated: FederationResult) -> BenchRun:
        return BenchRun(
            label=job.entry.label,
            seed=job.seed,
            trial=job.trial.name,
            spec=simulated.spec,
            clients=[asdict(site) for site in job.trial.sites],
            accuracies=simulated.accuracies(),
            rounds=simulated.round,
            costs=costs(simulated.reports),
            wall_seconds=round(simulated.wall_seconds, 3),
            setup_seconds=round(simulated.setup_seconds, 3),
            state_hash=simulated.state_hash,
            backbone=self._backbone(job).fingerprint,
            data=self._data_of(job),
            provenance=provenance().model_dump(),
            outcomes=[_rounded(outcomes) for outcomes in simulated.outcomes],
        )


def _rounded(outcomes: Outcomes) -> Outcomes:
    """The outcomes with confidences rounded to six places, since a file holds one for each image."""
    return replace(outcomes, confidence=tuple(round(value, 6) for value in outcomes.confidence))


def costs(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The costs of a client and round: bytes each way and seconds of training, as means over rounds and clients.

    ``trained`` are the numbers that a client optimises: the mean over clients, and the median over rounds.
    """
    rounds = [report["phases"] for report in reports if report["phases"]]
    if not rounds:
        return {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0, "trained": 0.0}

    def per_client(amount: Callable[[Any], float]) -> list[float]:
        return [sum(map(amount, phases)) / len(phases[0]["asked"]) for phases in rounds]

    def metric(name: str) -> Callable[[Any], float]:
        return lambda phase: sum(update["metrics"].get(name, 0.0) for update in phase["updates"])

    return {
        "bytes_up": fmean(per_client(lambda phase: phase["bytes_up"])),
        "bytes_down": fmean(per_client(lambda phase: phase["bytes_down"])),
        "seconds": fmean(per_client(metric("train_seconds"))),
        "trained": median(per_client(metric("trained_parameters"))),
    }


def identity(bench: Bench) -> JsonObject:
    """The settings that must be the same for all runs of a folder, so that one table can compare them."""
    setting = {name: value for name, value in asdict(bench.setting).items() if name not in GROWS}
    parts = {"protocol": bench.protocol.name, "setting": setting, "spec": dict(bench.base), "m": bench.m}
    plain: JsonObject = json.loads(json.dumps(parts))
    return plain


def claim(out: Path, bench: Bench) -> None:
    """Make ``out`` the bench's folder.

    Raises:
        PromptfedError: it belongs to another bench, with the differences, or cannot be written.
    """
    here, there = identity(bench), _identity_in(out)
    if there is not None:
        differs = [name for name in here if there.get(name) != here[name]]
        if differs:
            what = "; ".join(f"{name} was {_short(there.get(name))}, is {_short(here[name])}" for name in differs)
            text = f"{out} holds another bench ({what}): give --out another folder, or run that one again"
            raise BadInput(text)
    text = json.dumps(here, indent=1, ensure_ascii=False)
    try:  # whole, since another bench may begin in this folder at the same time, or this one be killed
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write_whole(out / BENCH_FILE, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise BadInput(f"cannot write {out / BENCH_FILE}: {why(error)}") from None


def _identity_in(out: Path) -> JsonObject | None:
    """The identity of the folder's bench; None for a new folder."""
    path = out / BENCH_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        raise BadInput(f"{path} cannot be read: give --out another folder") from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
