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
from promptfed.shared.metrics.conformal import Calibration, prediction_set
from promptfed.shared.metrics.score_sums import ScoreSums, UnknownGroup

ALONE = "the export has no calibration scores: give --calibration FILE, or create the federation with `calibration`"


@dataclass(frozen=True)
class PredictionSets:
    """Makes the sets of answers; ``thresholds`` are by class, where the sets shall hold for each class."""

    threshold: float
    thresholds: Mapping[str, float] | None

    @classmethod
    def of(
        cls, scores: Calibration | ScoreSums, coverage: float, *, by_class: bool = False, group: str | None = None
    ) -> PredictionSets:
        """The sets by calibration scores.

        Args:
            scores: of the calibration images.
            coverage: the probability with which a set holds the right class.
            by_class: within each class.
            group: within the images of a subgroup, as ``scanner=old``.

        Raises:
            CommandError: the scores are not counted by class, or not of this group.
        """
        column, equals, value = (group or "").partition("=")
        if group is not None and not (column and equals):
            raise CommandError(f"{group} names no subgroup: give COLUMN=VALUE, as in scanner=old", Exit.USAGE)
        try:
            own = scores.of((column, value) if group is not None else None)
        except UnknownGroup as known:
            text = f"there are no calibration scores of {group}; subgroups that have some: {known}"
            raise CommandError(text, Exit.BAD_INPUT) from None
        by_name = own.thresholds(coverage) if by_class else None
        if by_class and by_name is None:
            text = "the calibration scores are of all classes together: leave --by-class out, or set "
            raise CommandError(f"{text}calibration.by_class: true where they are counted", Exit.BAD_INPUT)
        return cls(own.threshold(coverage), by_name)

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


def own_scores(model: AdaptedModel, names: Sequence[str], *, own_names: bool = True) -> ScoreSums:
    """The calibration scores that the federation of ``model`` has counted, of its classes ``names``.

    Raises:
        CommandError: it has counted none, or ``names`` are not its own (``own_names``).
    """
    statistics = statistics_of(model.make_method())
    if statistics is None or not statistics.bins:
        raise CommandError(ALONE, Exit.BAD_INPUT)
    if not own_names:
        text = "the export's calibration scores are of its own classes: leave --classes and --data out"
        raise CommandError(text, Exit.BAD_INPUT)
    counts = np.rint(np.asarray(model.state[CALIBRATION], dtype=np.float64) * UNIT).astype(np.int64)
    sites, slack = np.rint(np.asarray(model.state[SITES], dtype=np.float64) * UNIT).astype(int).tolist()
    if not sites:
        raise CommandError(ALONE, Exit.BAD_INPUT)
    classes = tuple(names) if statistics.by_class else ()
    return ScoreSums(counts, sites, slack, statistics.epsilon, classes, statistics.column, statistics.values)
