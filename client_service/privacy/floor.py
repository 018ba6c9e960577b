"""The disclosure floor of a site: what leaves it tells of no number below the floor, except that it is below.

A number of images leaves as the range of `floor` numbers that it lies in, such as 0 to 9 or 30 to 39, and every
proportion is computed from such ranges, never from the numbers: no fraction can be turned back into them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping

from promptfed.client_service.privacy.policy import Policy
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods.core.interface.base import Method

Patients = Callable[[str], int | None]
"""The number of patients of a test set by its name; None where the data name none."""


def floor_of(policy: Policy | None) -> int:
    """The site's floor: its policy's, without a policy none (1)."""
    return policy.metrics.floor if policy is not None else 1


def lowest(count: int, floor: int) -> int:
    """The lower end of the range of a number."""
    return count - count % max(1, floor)


def middle(count: int, floor: int) -> float:
    """The middle of the range of a number."""
    return lowest(count, floor) + (max(1, floor) - 1) / 2


def declared_images(count: int, floor: int, info: EnrolmentInfo) -> int:
    """The number of images that a client enrols with: rounded down to a multiple of the floor.

    Training under privacy.level sample is accounted by its exact number.
    """
    if info.privacy is not None and info.privacy.protects_records:
        return count
    return lowest(count, floor)


def coded_accuracy(right: int, count: int, floor: int, patients: int | None = None) -> float | None:
    """The accuracy of ``count`` images; None below twice the floor, where right or wrong answers are always few.

    It follows from the range of ``count``, the same in every round, and that of the rarer answers, right or wrong.
    """
    if count == 0 or (floor > 1 and min(count, count if patients is None else patients) < 2 * floor):
        return None
    if floor <= 1:
        return right / count
    wrong = count - right
    rarer = middle(min(right, wrong), floor) / middle(count, floor)
    return min(rarer, 0.5) if right < wrong else max(1 - rarer, 0.5)


def coded_mean(value: float, count: int, floor: int) -> float:
    """A mean over ``count`` images of numbers from 0 to 1 as it leaves: their sum is told as a number of images is."""
    if floor <= 1:
        return value
    return min(1.0, middle(int(round(value * count, 6)), floor) / middle(count, floor))


def large_enough(results: Mapping[str, SplitResult], floor: int, patients: Patients) -> dict[str, SplitResult]:
    """The results of test sets that reach twice the floor, in images and in patients."""
    return {
        name: result
        for name, result in results.items()
        if coded_accuracy(0, result.num_samples, floor, patients(name.partition("@")[0])) is not None
    }


def floored(results: Mapping[str, SplitResult], floor: int, patients: Patients) -> dict[str, SplitResult]:
    """What of a federation's results leaves: accuracies from ranges.

    A macro-F1 would tell of classes. An ECE is the accuracy itself where all confidences are equal, to which a state
    can be made.
    """
    if floor <= 1:
        return dict(results)
    told = {}
    for name, result in large_enough(results, floor, patients).items():
        accuracy = coded_accuracy(round(result.accuracy * result.num_samples), result.num_samples, floor)
        assert accuracy is not None
        told[name] = SplitResult(accuracy=accuracy, num_samples=lowest(result.num_samples, floor))
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
