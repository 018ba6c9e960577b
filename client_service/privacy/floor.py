"""The disclosure floor of a site: what leaves it tells of no number below the floor, except that it is below.

A number of images leaves as the range of `floor` numbers that it lies in, such as 0 to 9 or 30 to 39, and every
proportion is computed from such ranges, never from the numbers: no fraction can be turned back into them. What is no
count of images stays: ECE, macro-F1, average precision, shares of domains (which add up to the number of images) and
seconds. Whoever chooses states still learns from many answers where a count crosses a range, so that few states are
answered (`AnsweredStates`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from promptfed.client_service.privacy.policy import STATES, Policy
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods.core.interface.base import Method

FILE = "answered-states.json"
Patients = Callable[[str], int | None]
"""The number of patients of a test set by its name; None where the data name none."""


def floor_of(policy: Policy | None) -> int:
    """The site's floor: its policy's, without a policy none (1)."""
    return policy.metrics.floor if policy is not None else 1


def states_of(policy: Policy | None) -> int:
    """How many different states are answered on one test set under a floor."""
    return policy.metrics.states if policy is not None else STATES


class _Answered(BaseModel):
    """By test set, a hash of its images: the digests of the states that were answered, in order."""

    sets: dict[str, list[str]] = {}


@dataclass(frozen=True)
class AnsweredStates:
    """The states that a client has answered, in its folder: at most ``most`` on one test set."""

    folder: PrivateState
    most: int

    def admitted(self, images: Mapping[str, str], state: str) -> set[str]:
        """The test sets, by name, that may answer ``state`` (a digest); on the disk before anything is told.

        ``images``: the hash of each test set's images, so that another name is no other test set.
        """
        known = self.folder.read_as(FILE, _Answered) or _Answered()
        new = False
        for own in set(images.values()):
            listed = known.sets.setdefault(own, [])
            if state not in listed and len(listed) < self.most:
                listed.append(state)
                new = True
        if new:
            self.folder.write_as(FILE, known)
        return {name for name, own in images.items() if state in known.sets[own]}


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


def without_shares(measured: Mapping[str, float], method: Method, floor: int) -> dict[str, float]:
    """The numbers of training without fractions of images, from which counts follow."""
    kept = method.shares if floor > 1 else ()
    return {
        name: value
        for name, value in measured.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in kept)
    }
