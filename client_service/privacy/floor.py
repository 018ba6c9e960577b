"""The disclosure floor of a site: which accuracies and numbers of images leave it, and how exact they are."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping

from promptfed.client_service.privacy.policy import Policy
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods.core.interface.base import Method
from promptfed.shared.metrics.disclosure import coded, coded_accuracy, coded_mean

Patients = Callable[[str], int | None]
"""The number of patients of a test set by its name; None where the data name none."""


def floor_of(policy: Policy | None) -> int:
    """The site's floor: its policy's, without a policy none (1)."""
    return policy.metrics.floor if policy is not None else 1


def declared_images(count: int, floor: int, info: EnrolmentInfo) -> int:
    """The number of images that a client enrols with: rounded down to a multiple of the floor.

    Training under privacy.level sample is accounted by its exact number.
    """
    if info.privacy is not None and info.privacy.protects_records:
        return count
    return coded(count, floor).low


def large_enough(results: Mapping[str, SplitResult], floor: int, patients: Patients) -> dict[str, SplitResult]:
    """The results of test sets that reach twice the floor, in images and in patients."""
    return {name: result for name, result in results.items() if _reaches(name, result, floor, patients)}


def _reaches(name: str, result: SplitResult, floor: int, patients: Patients) -> bool:
    people = patients(name.partition("@")[0])
    return coded_accuracy(0, result.num_samples, floor, people) is not None


def floored(results: Mapping[str, SplitResult], floor: int, patients: Patients) -> dict[str, SplitResult]:
    """What of a training federation's results leaves: accuracies from ranges.

    A macro-F1 would tell of classes. An ECE is the accuracy itself where all confidences are equal, to which a state
    can be made.
    """
    if floor <= 1:
        return dict(results)
    told = {}
    for name, result in large_enough(results, floor, patients).items():
        right = round(result.accuracy * result.num_samples)
        accuracy = coded_accuracy(right, result.num_samples, floor)
        assert accuracy is not None
        told[name] = SplitResult(accuracy=accuracy.value, num_samples=accuracy.images.low)
    return told


def floored_shares(shares: Mapping[str, float], images: int, floor: int) -> dict[str, float]:
    """Mean shares over so many images as they leave."""
    return {name: coded_mean(value, images, floor) for name, value in shares.items()}


def without_shares(measured: Mapping[str, float], method: Method, floor: int) -> dict[str, float]:
    """The numbers of training without fractions of images, from which counts follow."""
    kept = method.shares if floor > 1 else ()
    return {
        name: value
        for name, value in measured.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in kept)
    }
