"""The numbers that clients send beside tensors and accuracies: what a method declares, within limits."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from promptfed.shared.methods.core.interface import Method

MEASURED = ("train_seconds", "trained_parameters")  # that every method's update carries
PROTECTED = ("steps", "trained_parameters")  # all that protected training reports: neither depends on data
LARGEST = 1e30  # whose means, and float32 numbers, are finite
_OF_REPORTS = """
accuracy answered asked bytes bytes_down bytes_up counted distance ece influence macro_f1 mean_norm norm seconds
sum_clients sum_weight weight zero_shot
"""
OF_REPORTS = frozenset(_OF_REPORTS.split())
"""Names in a report's table of numbers that are the coordinator's own: what a client calls so is not taken."""


def of_training(method: Method, protected: bool, summed: bool) -> list[str]:
    """Patterns of the numbers of an update; under protection those that depend on no data, with secure sums none."""
    if summed:
        return []
    return sorted(PROTECTED if protected else {*method.metrics, *MEASURED})


def of_evaluation(method: Method) -> list[str]:
    """Patterns of the numbers of an evaluation, besides accuracies."""
    return ["evaluate_seconds", *method.evaluation_metrics]


def declared(numbers: Mapping[str, float], patterns: Iterable[str]) -> dict[str, float]:
    """Those of ``numbers`` whose names fit one of ``patterns``, and whose values have a size that can be told."""
    names = list(patterns)
    return {
        name: value
        for name, value in numbers.items()
        if abs(value) <= LARGEST
        and name not in OF_REPORTS
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
    }
