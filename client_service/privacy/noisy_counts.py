"""Accuracies that leave a site as noisy counts, or coarse under the disclosure floor; drawn once, written down.

A count of right answers on a test set of N images is k + η with P(η) ∝ e^(−a·|η|), clamped to 0 ... N: one image moves
k by one, so it costs ε = a. That holds only where nothing but the count depends on the test images, and where the
classifier is public, or private and trained under noise; fine-tuned ones are withheld. The order is that of updates
(`ledger`): the body is on the disk, then its spend, then it is sent, and the same body costs nothing again.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger, keep_head
from promptfed.client_service.privacy.policy import STATES, Policy
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.canonical import canonical_json
from promptfed.shared.data.source import Source
from promptfed.shared.messages import (
    EnrolmentInfo,
    EvaluationRequest,
    PrivacyEvent,
    Role,
    SpendReport,
    SplitResult,
    Task,
)
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.methods.core.several_labels import is_for_several_labels
from promptfed.shared.privacy.accounting import Event, default_delta
from promptfed.shared.privacy.noise import Noise, NoiseStream
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.sections import PrivacySpec

log = logging.getLogger("promptfed.client")

Leaving = Literal["withheld", "noisy", "plain"]
DRAWN_FILE = "noisy-counts.json"
STRICTNESS: tuple[Leaving, ...] = ("withheld", "noisy", "plain")
LEAST_IMAGES, USUAL = 1000, 0.1  # of a test set: of fewer, noise of the usual ε leaves little
Results = Mapping[str, SplitResult]
ANSWERED_FILE = "answered-states.json"

Patients = Callable[[str], int | None]
"""The number of patients of a test set by its name; None where the data name none."""


class _Drawn(BaseModel):
    """The last counts that were drawn.

    Attributes:
        body: the evaluation as it is sent; None where the budget had no room for it.
        zero_shot: the template's counts that were paid before, by what they depend on.
        new: those that are paid with ``body``.
    """

    task_id: str = ""
    round: int = 0
    phase: str = ""
    body: dict[str, Any] | None = None
    zero_shot: dict[str, SplitResult] = {}
    new: dict[str, SplitResult] = {}

    @property
    def release(self) -> str:
        """The name of ``body`` in the ledger."""
        return hashlib.sha256(canonical_json(self.body).encode()).hexdigest()


def what_leaves(
    info: EnrolmentInfo, method: Method, role: Role, policy: Policy | None, handed_in: bool = False, floor: int = 1
) -> Leaving:
    """What a site reveals of its accuracies: the stricter of the federation's wish and its owner's policy.

    Under protection of records or of whole clients, or beside secure sums, they leave in the clear only where spec and
    owner both say so. Under protection of records, those of fine-tuned classifiers, which were trained without noise,
    never leave. An evaluator trains nothing: what its own test set says is its owner's choice alone. ``handed_in``: who
    builds the worker chose plain for the owner.

    Of several labels no figure leaves as a noisy count, nor under a disclosure ``floor``: one image may move a mean
    average precision by far more than one right answer, and it is no function of ranges of counts.
    """
    leaving = _wished(info, method, role, policy, handed_in)
    return "withheld" if (leaving == "noisy" or floor > 1) and is_for_several_labels(method) else leaving


def _wished(info: EnrolmentInfo, method: Method, role: Role, policy: Policy | None, handed_in: bool) -> Leaving:
    of_policy: Leaving | None = policy.metrics.accuracy if policy is not None else None
    protected = info.privacy is not None and info.privacy.protects_records
    guarded = info.privacy is not None or info.secure_aggregation is not None
    of_terms: Leaving = info.evaluation or (info.privacy.evaluations if info.privacy is not None else "plain")
    if guarded and role == "evaluator":
        unsaid: Leaving = "plain" if handed_in else "noisy" if of_terms == "noisy" else "withheld"
        return of_policy or unsaid
    if of_policy is None and guarded and of_terms == "plain":
        of_policy = "plain" if handed_in else "withheld"
    stricter = min(of_terms, of_policy or of_terms, key=STRICTNESS.index)
    if info.selection is not None and stricter == "noisy":  # noise would decide, and both test sets' budgets pay
        return "withheld"
    tuned = method.fine_tunes and role == "trainer"
    return "withheld" if tuned and (protected or stricter == "noisy") else stricter


def noisy_count(stream: NoiseStream, result: SplitResult, a: float) -> SplitResult:
    """The share of right answers with discrete Laplace noise on their number, and no other figure."""
    right = round(result.accuracy * result.num_samples)
    drawn = min(max(right + stream.discrete_laplace(a), 0), result.num_samples)
    return SplitResult(accuracy=drawn / result.num_samples, num_samples=result.num_samples)


def overlap(source: Source, tests: Mapping[str, Source]) -> bool:
    """Whether an image is both trained and tested on: then their budgets are not apart."""
    trained = {source.train.digest(row) for row in range(len(source.train))}
    splits = [source.test, *(test.test for test in tests.values())]
    return any(split.digest(row) in trained for split in splits for row in range(len(split)))


@dataclass
class NoisyCounts:
    """One client's noisy counts in one federation; ``most`` is the limit of its test images' ε."""

    info: EnrolmentInfo
    ledger: Ledger
    noise: Noise
    state: PrivateState
    most: float
    client: str
    coordinator: str

    @property
    def privacy(self) -> PrivacySpec:
        """The federation's privacy settings; the defaults if it has none."""
        return self.info.privacy or PrivacySpec()

    def begun(self, source: Source, tests: Mapping[str, Source], delta: float | None) -> NoisyCounts | None:
        """These counts, with a ledger that has begun; None where an image is both trained and tested on."""
        if overlap(source, tests):
            log.warning("accuracies are withheld: some images are both trained and tested on, and have one budget")
            return None
        if self.ledger.delta() is None:  # where nobody trains under protection
            self.ledger.open(delta or self.privacy.delta or default_delta(max(1, len(source.test))))
        if len(source.test) < LEAST_IMAGES and self.privacy.evaluation_epsilon <= USUAL:
            text = "%d test images under noise of ε = %g: an accuracy is off by %.0f images and says little"
            a = self.privacy.evaluation_epsilon
            log.warning(text, len(source.test), a, 2**0.5 / a)
        return self

    def kept(self, task: Task) -> EvaluationRequest | None:
        """What was drawn for this very task, and paid for: it is sent again unchanged. Unpaid, it is paid now."""
        drawn = self._last()
        return self._paid(task, drawn) if drawn.task_id == task.task_id else None

    def drawn(self, task: Task, splits: Results, zero_shot: Results, keys: Mapping[str, str]) -> EvaluationRequest:
        """Noisy counts of ``splits``, and of ``zero_shot``, which are drawn once for each of ``keys`` (by split).

        Withheld where there are none, or the test images' budget has no room for them.
        """
        last = self._last()
        paid = last.zero_shot | (last.new if self._is_paid(last) else {})
        new = {keys[name]: result for name, result in zero_shot.items() if keys[name] not in paid}
        if not splits and not new:
            return EvaluationRequest(splits={}, withheld=True)
        a = self.privacy.evaluation_epsilon
        event = Event("laplace", 1.0, a, len(splits) + len(new))
        try:
            epsilon = self.ledger.expect([event], self.most, "test")
        except BudgetExhausted as error:
            return self._withheld(error)
        stream = self.noise.stream("evaluation", task.round, task.phase, self.client)
        noisy = {name: noisy_count(stream, result, a) for name, result in sorted(splits.items())}
        fresh = {key: noisy_count(stream, result, a) for key, result in sorted(new.items())}
        every = paid | fresh
        request = EvaluationRequest(
            splits=noisy,
            zero_shot={name: every[keys[name]] for name in zero_shot},
            privacy=SpendReport(
                events=[PrivacyEvent(**event.as_json())],
                epsilon=epsilon,
                delta=self.ledger.delta() or 0.0,
                noise=self.noise.kind,
            ),
        )
        body = request.model_dump(mode="json")
        drawn = _Drawn(task_id=task.task_id, round=task.round, phase=task.phase, body=body, zero_shot=paid, new=fresh)
        self.state.write_as(DRAWN_FILE, drawn)
        point("counts-written")
        return self._paid(task, drawn)

    def _paid(self, task: Task, drawn: _Drawn) -> EvaluationRequest:
        """The kept body, once its spend is in the ledger."""
        request = EvaluationRequest.model_validate(drawn.body)
        assert request.privacy is not None
        events = [event.event() for event in request.privacy.events]
        about = {
            "federation_id": self.info.federation_id,
            "federation": self.info.name,
            "coordinator": self.coordinator,
            "round": task.round,
            "phase": task.phase,
            "task_id": task.task_id,
            "noise": request.privacy.noise,
        }
        try:
            self.ledger.spend(drawn.release, events, self.most, about, "test")
            keep_head(self.ledger, self.state)
        except BudgetExhausted as error:
            self.state.write_as(DRAWN_FILE, _Drawn(zero_shot=drawn.zero_shot))
            return self._withheld(error)
        point("counts-spent")
        return request

    def _is_paid(self, drawn: _Drawn) -> bool:
        return drawn.body is not None and any(spend.release == drawn.release for spend in self.ledger.spends())

    def _withheld(self, error: BudgetExhausted) -> EvaluationRequest:
        log.warning("accuracies are withheld: the budget of the test images is exhausted (%s)", error)
        return EvaluationRequest(splits={}, withheld=True)

    def _last(self) -> _Drawn:
        return self.state.read_as(DRAWN_FILE, _Drawn) or _Drawn()


def floor_of(policy: Policy | None) -> int:
    """The site's floor: its policy's, without a policy none (1)."""
    return policy.metrics.floor if policy is not None else 1


def states_of(policy: Policy | None) -> int:
    """How many different states are answered on one test set under a floor."""
    return policy.metrics.states if policy is not None else STATES


def planned_rounds(last: int, every: int, most: int) -> frozenset[int]:
    """At most ``most`` of the rounds that a federation evaluates (0, each ``every`` and the ``last``).

    They are spread evenly, and the last is always among them.
    """
    rounds = [*range(0, last, every), last]
    if len(rounds) <= most:
        return frozenset(rounds)
    return frozenset(rounds[place * (len(rounds) - 1) // max(1, most - 1)] for place in range(most - 1)) | {last}


class _Answered(BaseModel):
    """The digests of the states that were answered, in order: by a hash of the images, and by a test set's name."""

    sets: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}


@dataclass(frozen=True)
class AnsweredStates:
    """The states that a client has answered, in its folder: at most ``most`` on one test set.

    Neither another name of the same images is another test set, nor are other images of the same name. One answer is
    kept for the state after the ``last`` round. ``every``: rounds from one evaluation to the next.
    """

    folder: PrivateState
    most: int
    last: int = 0
    every: int = 1

    def admitted(self, images: Mapping[str, str], state: str, round: int | None = None) -> set[str]:
        """The test sets, by name, that may answer ``state`` (a digest); on the disk before anything is told.

        ``images``: the hash of each test set's images. ``round``: that of the state; None: the last.
        """
        answered = self.folder.read_as(ANSWERED_FILE, _Answered) or _Answered()
        is_last = round is None or round == self.last
        planned = is_last or round in planned_rounds(self.last, self.every, self.most)
        room = self.most if is_last else self.most - 1
        admitted, new = set(), False
        for name, images_hash in sorted(images.items()):
            lists = answered.sets.setdefault(images_hash, []), answered.names.setdefault(name, [])
            if state not in lists[0] and not (planned and all(state in one or len(one) < room for one in lists)):
                continue
            admitted.add(name)
            for one in lists:
                if state not in one:
                    one.append(state)
                    new = True
        if new:
            self.folder.write_as(ANSWERED_FILE, answered)
        return admitted


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
    floored_results = {}
    for name, result in large_enough(results, floor, patients).items():
        accuracy = coded_accuracy(round(result.accuracy * result.num_samples), result.num_samples, floor)
        assert accuracy is not None
        floored_results[name] = SplitResult(accuracy=accuracy, num_samples=lowest(result.num_samples, floor))
    return floored_results


def without_shares(measured: Mapping[str, float], method: Method, floor: int) -> dict[str, float]:
    """The numbers of training without fractions of images, from which counts follow."""
    kept = method.shares if floor > 1 else ()
    return {
        name: value
        for name, value in measured.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in kept)
    }
