"""Trials of a run file: the same sites with any method and learning rate, tested on held-out training images."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from promptfed.experiments.bench.runner import costs
from promptfed.experiments.figures.comparison import Floats
from promptfed.experiments.protocols.setting import with_options
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.run_file import RunFile
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import FederationResult
from promptfed.shared.data import DataError
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods import method_for
from promptfed.shared.metrics.outcomes import ZERO_SHOT
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, merged

OF_A_METHOD = ("optimizer", "learning_rate", "momentum", "weight_decay", "schedule")
"""Training settings of a run file that suit its own method; another method has its defaults."""

Answers = Mapping[tuple[str, str], Floats]  # whether each image was classified rightly, by client and list of images


@dataclass(frozen=True)
class Candidate:
    """A method with a learning rate."""

    method: str
    rate: float

    def __str__(self) -> str:
        return f"{self.method}, rate {self.rate:g}"


@dataclass(frozen=True)
class Trial:
    """What a candidate reached after ``rounds``: accuracies are fractions of all held-out images of all trainers.

    With several labels per image the accuracy is the trainers' mean of the mean average precision.

    ``right`` and ``template`` are the answers that pair it with others. ``seconds`` include the evaluation;
    ``bytes_round`` are those of one client and round, both ways.
    """

    candidate: Candidate
    rounds: int
    right: Answers
    template: Answers
    confidences: tuple[tuple[float, ...], ...]
    seconds: float
    bytes_round: float

    @property
    def accuracy(self) -> float:
        """The share of right answers; 0 for a federation whose updates were refused."""
        return mean_of(self.right)


def mean_of(answers: Answers) -> float:
    """The mean over all images; 0 without any."""
    return float(np.concatenate(list(answers.values())).mean()) if answers else 0.0


def held_out_sites(sites: Sequence[Site], share: float, seed: int | None = None) -> list[Site]:
    """The trainers, each tested on a share of its own training images, drawn by ``seed``. No test image is used."""
    options = {"validation": share, "validation_seed": seed}
    trainers = [site for site in sites if site.role == "trainer"]
    return [replace(site, data=with_options(site.data, options), tests={}) for site in trainers]


class Trials:
    """Runs candidates for the sites of a run file. They share the backbone, the data and the image features."""

    def __init__(
        self,
        run: RunFile,
        features: Path,
        share: float,
        *,
        pool: int = 1,
        device: str = "cpu",
        allow_backbone: AllowedBackbones = False,
    ):
        self._run, self._features, self._share, self._pool = run, features, share, pool
        self._sources = SharedSources()
        self.default = resolve(run.spec)
        self._backbone = open_backbone(self.default.backbone, allow_backbone=allow_backbone, device=device)
        self._names = self._common_names()

    def _common_names(self) -> list[str] | None:
        """The classes of all trainers, if they have the same; methods with a row for each class need a list."""
        try:
            named = {self._sources.open(site.data).class_names for site in self._run.sites if site.role == "trainer"}
        except DataError as error:
            raise CommandError(str(error), Exit.BAD_INPUT) from None
        return list(named.pop()) if len(named) == 1 else None

    def changes(self, method: str, rate: float | None = None) -> dict[str, Any]:
        """The keys of the run file that differ for ``method``, as they are to be written. Without ``rate`` it is left.

        Raises:
            CommandError: the method cannot run with this file; the text says why.
        """
        given, own = self._run.spec, method == self.default.method["name"]
        training = dict(given.get("training") or {})
        if not own:
            training = {key: value for key, value in training.items() if key not in OF_A_METHOD}
        if rate is not None:
            training["learning_rate"] = rate
        changes = {"method": given["method"] if own else {"name": method}, "training": training}
        once: dict[str, Any] = {"rounds": 1}  # the only number for a method that exchanges statistics once
        named = {"class_names": self._names} if self._names and not given.get("class_names") else {}
        refusals = []
        for more in ({}, named, once, named | once):
            try:
                self._expect_fits(resolve({**given, **changes, **more}))
                return changes | more
            except CommandError as error:
                refusals.append(error)
        raise refusals[0]

    def _expect_fits(self, spec: FederationSpec) -> None:
        if any(site.role == "evaluator" for site in self._run.sites) and not method_for(spec).takes_evaluators:
            raise CommandError("it has no classifier for evaluators, which the run file has", Exit.BAD_INPUT)

    def spec(self, method: str, rate: float | None = None) -> FederationSpec:
        """The resolved spec. Raises CommandError as `changes`."""
        return resolve({**self._run.spec, **self.changes(method, rate)})

    def run(self, candidate: Candidate, rounds: int, seed: int) -> Trial:
        """Train ``candidate`` for at most ``rounds``; ``seed`` draws the held-out images and everything else.

        Raises:
            CommandError: the federation cannot be run. One whose updates are refused, as by a rate that is far too
                high, has a trial with the accuracy 0.
        """
        changes = self.changes(candidate.method, candidate.rate)
        rounds = min(rounds, changes.get("rounds", rounds))
        changed = {"rounds": rounds, "evaluation": {"every": rounds}, "seed": seed}
        raw = merged({**self._run.spec, **changes}, changed)
        sites = held_out_sites(self._run.sites, self._share, seed)
        shared: dict[str, Any] = {"backbone": self._backbone, "features": self._features, "sources": self._sources}
        began = time.monotonic()
        try:
            result = simulate(raw, sites, pool=self._pool, **shared)
        except CommandError as error:
            if not has_diverged(error):
                raise
            return Trial(candidate, rounds, {}, {}, (), time.monotonic() - began, 0.0)
        return _trial(candidate, result, time.monotonic() - began)


def _trial(candidate: Candidate, result: FederationResult, seconds: float) -> Trial:
    if result.federation.spec.task == "multi_label":
        return _trial_of_several(candidate, result, seconds)
    right: dict[str, dict[tuple[str, str], Floats]] = {"test": {}, f"test@{ZERO_SHOT}": {}}
    own = [outcomes for outcomes in result.outcomes if outcomes.split in right]
    for outcomes in own:
        answers = np.equal(outcomes.labels, outcomes.predicted).astype(float)
        right[outcomes.split][outcomes.client, outcomes.images] = answers
    price = costs(result.reports)
    return Trial(
        candidate,
        result.round,
        right["test"],
        right[f"test@{ZERO_SHOT}"],
        tuple(outcomes.confidence for outcomes in own if outcomes.split == "test"),
        seconds,
        price["bytes_up"] + price["bytes_down"],
    )


def _trial_of_several(candidate: Candidate, result: FederationResult, seconds: float) -> Trial:
    """With several labels per image the mean average precision of each client is paired, as one number."""
    own = [told for told in result.accuracies(result.round) if told.split == "test"]
    price = costs(result.reports)
    return Trial(
        candidate,
        result.round,
        {(told.client, ""): np.array([told.accuracy]) for told in own},
        {(told.client, ""): np.array([told.zero_shot]) for told in own if told.zero_shot is not None},
        (),
        seconds,
        price["bytes_up"] + price["bytes_down"],
    )


def has_diverged(error: CommandError) -> bool:
    """Whether the federation ended because a change was too long or the state grew without bound."""
    ended = error.exit in (Exit.FEDERATION_ENDED_BADLY, Exit.FAILED)  # or a site's evaluation has failed
    return ended and any(sign in str(error) for sign in ("norm-too-large", "not finite", "NaN or infinity"))
