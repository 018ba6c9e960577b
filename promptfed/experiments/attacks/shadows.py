"""Shadow federations: the same run again and again, each time with other images of one client, chosen by coins.

A score that tells which images took part shows how much the prompts reveal about single images. Canaries are images
with a wrong label, which only training on them makes likely. Sources: Carlini et al., 2022 (scores beside shadows);
PIPRA, AAAI 2026 (features of prompts; the idea, not its network); Steinke et al., 2023 (ε of one run).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.experiments.attacks import membership
from promptfed.experiments.attacks.membership import Attack, Scores, log_odds, losses
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError, Source
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.methods.core.interface.base import Classifier
from promptfed.shared.seeds import derive_seed

LEAST_SHADOWS = 3  # on which a regression is fitted
GUESSED = 0.5  # share of the canaries that is guessed: the surest, half as in and half as out
CHANCE = 0.05

Table = NDArray[np.float64]
Serve = Callable[[FederationResult, Backbone, tuple[str, ...]], tuple[Classifier, Classifier | None]]
"""Makes the classifier of a federation's global state over class names, and the template's."""


@dataclass(frozen=True)
class Shadow:
    """One run: the images it was trained on ``(n,)``, and the scores ``(n,)`` of all images by its prompts.

    ``loss``: minus the loss; ``odds``: φ; ``gained``: φ minus the template's, where there are texts; ``features``
    ``(n, F)``; ``epsilon``: the client's claim, or None.
    """

    present: NDArray[np.bool_]
    loss: Scores
    odds: Scores
    gained: Scores
    features: Table
    epsilon: float | None


@dataclass(frozen=True)
class Shadows:
    """All runs. ``canaries`` ``(n,)``: whether an image has a wrong label."""

    client: str
    canaries: NDArray[np.bool_]
    runs: tuple[Shadow, ...]

    @property
    def claimed(self) -> float | None:
        """The largest claimed ε of the runs; None if a run claims none."""
        given = [run.epsilon for run in self.runs if run.epsilon is not None]
        return max(given) if len(given) == len(self.runs) else None

    def attacks(self, delta: float) -> list[Attack]:
        """Every attack on ordinary images, and on canaries."""
        attacks = []
        for suffix, chosen in (("", ~self.canaries), (" on canaries", self.canaries)):
            if chosen.sum() < 2:
                continue
            tables = {"loss": [run.loss for run in self.runs], "gained": [run.gained for run in self.runs]}
            tables |= {"lira": self._ratios()} if len(self.runs) >= 2 * membership.LEAST_REFERENCES else {}
            if not suffix and len(self.runs) > LEAST_SHADOWS:
                tables["features"] = self._regressed(chosen)
            attacks += [self._attack(name + suffix, scores, chosen, delta) for name, scores in tables.items()]
        return attacks

    def _attack(self, name: str, scores: Sequence[Scores], chosen: NDArray[np.bool_], delta: float) -> Attack:
        kept = [chosen & ~np.isnan(score) for score in scores]
        both = list(zip(scores, self.runs, kept, strict=True))
        members = np.concatenate([score[known & run.present] for score, run, known in both])
        others = np.concatenate([score[known & ~run.present] for score, run, known in both])
        return membership.attack(name, members, others, delta)

    def _ratios(self) -> list[Scores]:
        """LiRA of each run with four runs as references that had not the image; NaN where there are fewer.

        Every image has four references, and whether it has them does not depend on this run's own coin.
        """
        present, odds = np.stack([run.present for run in self.runs]), np.stack([run.odds for run in self.runs])
        ratios = []
        for number in range(len(self.runs)):
            absent = ~present
            absent[number] = False
            rows = np.argsort(~absent, axis=0, kind="stable")[: membership.LEAST_REFERENCES]
            references = np.take_along_axis(odds, rows, axis=0)
            enough = absent.sum(axis=0) >= membership.LEAST_REFERENCES
            ratio = np.full(len(enough), np.nan)
            if enough.any():
                ratio[enough] = membership.likelihood_ratio(odds[number, enough], list(references[:, enough]))
            ratios.append(ratio)
        return ratios

    def _regressed(self, chosen: NDArray[np.bool_]) -> list[Scores]:
        """Log odds of each run by a logistic regression on features, fitted on all other runs."""
        odds = []
        for run in self.runs:
            others = [other for other in self.runs if other is not run]
            rows = np.concatenate([other.features[chosen] for other in others])
            labels = np.concatenate([other.present[chosen] for other in others])
            odds.append(logistic(rows, labels, run.features))
        return odds

    def epsilon(self, delta: float) -> float:
        """Lower bound on ε by guessing the canaries of one run: the best run's, each with its share of the 5 % chance.

        The guesses use nothing of other runs, whose coins are not independent of this one's.
        """
        count = int(self.canaries.sum())
        each = int(GUESSED * count / 2)
        if not each:
            return 0.0
        best = 0.0
        for run in self.runs:
            order = np.argsort(run.gained[self.canaries], kind="stable")
            inside = run.present[self.canaries]
            right = int(inside[order[-each:]].sum() + (~inside[order[:each]]).sum())
            best = max(best, membership.one_run_bound(2 * each, right, count, delta, CHANCE / len(self.runs)))
        return best


def logistic(rows: Table, labels: NDArray[np.bool_], asked: Table) -> Scores:
    """Log odds ``(n,)`` of ``asked (n, F)`` by a logistic regression on standardised ``rows (N, F)``, ``labels (N,)``.

    All are 0 where the labels are all the same.
    """
    if labels.all() or not labels.any():
        return np.zeros(len(asked))
    model = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-8, max_iter=10_000))
    odds: Scores = model.fit(rows, labels).decision_function(asked)
    return odds


@dataclass(frozen=True)
class ShadowPlan:
    """A series of ``seeds`` shadow runs, with ``canaries`` wrong labels among the images of ``client``."""

    spec: Mapping[str, Any]
    sites: tuple[Site, ...]
    client: str
    seeds: int
    canaries: int


def run_shadows(
    plan: ShadowPlan,
    serve: Serve,
    backbone: Backbone,
    cache: FeatureCache,
    progress: Callable[[int], None] = lambda number: None,
) -> Shadows:
    """Run all shadows. A fair coin for each image of the client and each run decides whether the image takes part.

    Raises:
        CommandError: the client, its data or the number of canaries cannot be used, or a run failed.
    """
    site = next((site for site in plan.sites if site.name == plan.client), None)
    if site is None or site.role != "trainer":
        trainers = ", ".join(site.name for site in plan.sites if site.role == "trainer")
        text = f"no trainer of the run file is called {plan.client!r}: give one of {trainers}"
        raise CommandError(text, Exit.BAD_INPUT)
    try:
        source = SharedSources().open(site.data)
    except DataError as error:
        raise CommandError(f"client {site.name}: {error}", Exit.BAD_INPUT) from None
    count = len(source.train)
    if not 0 <= plan.canaries <= count:
        raise CommandError(f"{plan.canaries} canaries of {count} images: give fewer", Exit.BAD_INPUT)
    draws = np.random.default_rng(derive_seed(int(plan.spec.get("seed", 0)), "audit"))
    labels, wrong = mislabelled(source, plan.canaries, draws)
    coins = draws.integers(0, 2, (plan.seeds, count)).astype(bool)
    whole = replace(source, train=source.train.labelled(labels))
    runs = []
    for number, present in enumerate(coins):
        progress(number)
        sources, uri = SharedSources(), f"shadow {number} of {site.name}"
        rows = torch.from_numpy(np.flatnonzero(present))
        sources.add(uri, replace(source, uri=uri, train=source.train.select(rows).labelled(labels[rows])))
        sites = [replace(other, data=uri) if other.name == site.name else other for other in plan.sites]
        spec = {**plan.spec, "seed": derive_seed(int(plan.spec.get("seed", 0)), "shadow", number) % (1 << 31)}
        result = simulate(spec, sites, backbone=backbone, features=cache, sources=sources)
        both = serve(result, backbone, source.class_names)
        runs.append(Shadow(present, *_scores(both, whole, backbone, cache), _claimed(result, site.name)))
    return Shadows(site.name, wrong, tuple(runs))


def mislabelled(source: Source, canaries: int, draws: np.random.Generator) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """The training labels with ``canaries`` wrong ones, drawn evenly among the other classes; and which these are."""
    labels, classes = source.train.labels.clone(), len(source.class_names)
    wrong = np.zeros(len(labels), dtype=bool)
    wrong[draws.choice(len(labels), canaries, replace=False)] = True
    rows = torch.from_numpy(np.flatnonzero(wrong))
    labels[rows] = (labels[rows] + torch.from_numpy(draws.integers(1, classes, canaries))) % classes
    return labels, wrong


def _scores(
    both: tuple[Classifier, Classifier | None], source: Source, backbone: Backbone, cache: FeatureCache
) -> tuple[Scores, Scores, Scores, Table]:
    """Scores of every training image by the final global state: minus the loss, φ, φ over the template's, features."""
    split = ClientData(source, backbone, cache).split(TRAIN, source.class_names)
    tables = [membership.logits_of(classifier, split) for classifier in both if classifier is not None]
    odds = [log_odds(*table) for table in tables]
    gained = odds[0] - odds[1] if len(odds) > 1 else odds[0]
    return -losses(*tables[0]), odds[0], gained, np.concatenate([_features(*table) for table in tables], axis=1)


def _features(logits: Table, labels: NDArray[np.int64]) -> Table:
    """``(n, C + 4)``: scaled cosines to the classes' texts, the label's loss, margin, entropy, and the label's rank."""
    entropy = special.entr(special.softmax(logits, axis=1)).sum(axis=1)
    own = logits[np.arange(len(labels)), labels][:, None]
    rank = (logits > own).sum(axis=1)
    return np.column_stack([logits, -losses(logits, labels), log_odds(logits, labels), entropy, rank])


def _claimed(result: FederationResult, client: str) -> float | None:
    """The ε that the client reported at the end; None if it reported none."""
    spent = [
        update.privacy.epsilon
        for report in result.round_reports
        for phase in report.phases
        for update in phase.updates
        if update.client == client and update.privacy is not None
    ]
    return max(spent) if spent else None
