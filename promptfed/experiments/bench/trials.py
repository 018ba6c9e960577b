"""Trials of settings: simulations on held-out training images, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from promptfed.experiments.bench.protocols import with_options
from promptfed.experiments.bench.runner import costs
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import RunFile, common_names
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import shape_of
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import BadInput, EndedBadly, Failed, PromptfedError
from promptfed.shared.methods import check_fits, method_class, method_for, resolve_spec
from promptfed.shared.methods.core.registry import swept_training
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.metrics.outcomes import ZERO_SHOT
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec, merged

OF_A_METHOD = ("optimizer", "learning_rate", "momentum", "weight_decay", "schedule")
"""Training settings of a run file that suit its own method; another method has its defaults."""
Floats = NDArray[np.float64]
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
        self.default = resolve_spec(run.spec)
        self._backbone = open_backbone(self.default.backbone, allow_backbone=allow_backbone, device=device)
        self._names = self._common_names()

    def _common_names(self) -> list[str] | None:
        """The classes of the trainers (`common_names`); methods with a row for each class need a list."""
        trainers = (site for site in self._run.sites if site.role == "trainer")
        return common_names((site.role, self._sources.open(site.data).class_names) for site in trainers)

    def changes(self, method: str, rate: float | None = None) -> dict[str, Any]:
        """The keys of the run file that differ for ``method``, as they are to be written. Without ``rate`` it is left.

        Raises:
            PromptfedError: the method cannot run with this file; the text says why.
        """
        given, is_default = self._run.spec, method == self.default.method["name"]
        training = dict(given.get("training") or {})
        ignored = method_class(method).ignores
        if not is_default:
            training = {key: value for key, value in training.items() if key not in (*OF_A_METHOD, *ignored)}
        options = given["method"] if is_default else {"name": method}
        if rate is not None and "learning_rate" not in ignored:
            raw, backbone = {"method": options, "training": training}, self.default.backbone.model_dump()
            training |= swept_training(raw, method_class(method), backbone)
            training["learning_rate"] = rate
        changes = {"method": options, "training": training}
        once: dict[str, Any] = {"rounds": 1}  # the only number for a method that exchanges statistics once
        named = {"class_names": self._names} if self._names and not given.get("class_names") else {}
        refusals = []
        for more in ({}, named, once, named | once):
            try:
                self._expect_fits(resolve_spec({**given, **changes, **more}))
                return changes | more
            except PromptfedError as error:
                refusals.append(error)
        raise refusals[0]

    def _expect_fits(self, spec: FederationSpec) -> None:
        if any(site.role == "evaluator" for site in self._run.sites) and not method_for(spec).takes_evaluators:
            raise BadInput("it has no classifier for evaluators, which the run file has")
        check_fits(method_for(spec), shape_of(self._backbone))

    def spec(self, method: str, rate: float | None = None) -> FederationSpec:
        """The resolved spec. Raises PromptfedError as `changes`."""
        return resolve_spec({**self._run.spec, **self.changes(method, rate)})

    def run(self, candidate: Candidate, rounds: int, seed: int) -> Trial:
        """Train ``candidate`` for at most ``rounds``; ``seed`` draws the held-out images and everything else.

        Raises:
            PromptfedError: the federation cannot be run. One whose updates are refused, as by a rate that is far too
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
        except PromptfedError as error:
            if not has_diverged(error):
                raise
            return Trial(candidate, rounds, {}, {}, (), time.monotonic() - began, 0.0)
        return _trial(candidate, result, time.monotonic() - began)


def _trial(candidate: Candidate, result: FederationResult, seconds: float) -> Trial:
    price = costs(result.reports)
    bytes_round = price["bytes_up"] + price["bytes_down"]
    if result.federation.spec.task == "multi_label":  # each client's mean average precision is paired, as one number
        rows = [one for one in result.accuracies(result.round) if one.split == "test"]
        precision = {(one.client, ""): np.array([one.accuracy]) for one in rows}
        zero_shot = {(one.client, ""): np.array([one.zero_shot]) for one in rows if one.zero_shot is not None}
        return Trial(candidate, result.round, precision, zero_shot, (), seconds, bytes_round)
    answers: dict[str, dict[tuple[str, str], Floats]] = {"test": {}, f"test@{ZERO_SHOT}": {}}
    measured = [outcomes for outcomes in result.outcomes if outcomes.split in answers]
    for outcomes in measured:
        hits = np.equal(outcomes.labels, outcomes.predicted).astype(float)
        answers[outcomes.split][outcomes.client, outcomes.images] = hits
    confidences = tuple(outcomes.confidence for outcomes in measured if outcomes.split == "test")
    right, template = answers.values()
    return Trial(candidate, result.round, right, template, confidences, seconds, bytes_round)


def has_diverged(error: PromptfedError) -> bool:
    """Whether the federation ended because a change was too long or the state grew without bound."""
    ended = isinstance(error, EndedBadly | Failed)  # or a site's evaluation has failed
    return ended and any(sign in str(error) for sign in ("norm-too-large", "not finite", "NaN or infinity"))
