"""Prediction sets of an adapted model: the classes of which one is right with a given probability, or none is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from promptfed.client_service.serving.prediction import Predictor, Served
from promptfed.export.adapted_model import AdaptedModel
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.methods.core.statistics import CALIBRATION, SITES, UNIT, statistics_of
from promptfed.shared.metrics.conformal import prediction_set
from promptfed.shared.metrics.score_sums import ScoreSums

ALONE = "the export has no calibration scores: give --calibration FILE, or create the federation with `calibration`"


@dataclass(frozen=True)
class PredictionSets:
    """Makes the sets of answers; ``thresholds`` are by class, where the sets shall hold for each class."""

    threshold: float
    thresholds: Mapping[str, float] | None

    def added(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer with its ``set``, and whether the model ``abstains``: the set is empty, or holds all classes."""
        probabilities = {row["name"]: row["probability"] for row in answer["classes"]}
        inside = prediction_set(probabilities, self.threshold, self.thresholds)
        return answer | {"set": inside, "abstains": len(inside) in (0, len(probabilities))}


class SetPredictor(Predictor):
    """Predicts classes, and a set of them."""

    def __init__(self, served: Served, sets: PredictionSets):
        super().__init__()
        self.served, self.sets = served, sets

    def predict(self, content: bytes) -> dict[str, Any]:
        """As `Predictor.predict`, with ``set`` and ``abstains``."""
        return self.sets.added(super().predict(content))


def score_sums(model: AdaptedModel) -> ScoreSums | None:
    """The calibration scores that the federation of ``model`` has counted; None if it counted none."""
    statistics = statistics_of(model.make_method())
    if statistics is None or not statistics.bins:
        return None
    counts = np.rint(np.asarray(model.state[CALIBRATION], dtype=np.float64) * UNIT).astype(np.int64)
    sites, slack = np.rint(np.asarray(model.state[SITES], dtype=np.float64) * UNIT).astype(int).tolist()
    return ScoreSums(counts, sites, slack, statistics.epsilon) if sites else None


def own_sets(
    model: AdaptedModel, names: Sequence[str], coverage: float, *, by_class: bool, own_names: bool
) -> PredictionSets:
    """The sets by the federation's own calibration scores.

    Args:
        model: what classifies.
        names: the classes to choose among.
        coverage: the probability with which a set holds the right class.
        by_class: within each class.
        own_names: ``names`` are those of the federation.

    Raises:
        CommandError: it has no such scores, or is asked about other classes.
    """
    sums = score_sums(model)
    if sums is None:
        raise CommandError(ALONE, Exit.BAD_INPUT)
    if not own_names:
        text = "the export's calibration scores are of its own classes: leave --classes and --data out"
        raise CommandError(text, Exit.BAD_INPUT)
    by_name = sums.thresholds(names, coverage) if by_class else None
    if by_class and by_name is None:
        text = "the export's calibration scores are of all classes together: leave --by-class out, or create the "
        raise CommandError(f"{text}federation with calibration.by_class: true", Exit.BAD_INPUT)
    return PredictionSets(sums.threshold(coverage), by_name)
