"""What the coordinator answers about rounds: phases, updates, evaluations; and remarks on a federation.

A remark is one sentence for each apparent problem, with advice. Of clients' own test images only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from promptfed.shared.messages import Role, SplitResult
from promptfed.shared.metrics.estimates import gain_margin, mean_interval
from promptfed.shared.metrics.figures import nearly_one_class
from promptfed.shared.plain_text import counted
from promptfed.shared.privacy.accounting import LARGEST_EPSILON, MOST_EPSILON
from promptfed.shared.spec.section import left_out
from promptfed.shared.spec.spec import FederationSpec

NEAR_CHANCE = 0.05  # share of the range from chance to 100 %, below which the template hardly separates the classes
MOVED = 0.005  # change of accuracy that counts as none
LEARNED = 0.02  # share of the first round's loss by which it must fall if anything was learned
WORSE = 0.02  # accuracy below that of the template
ROOM = 0.1  # above the template's accuracy, below which a small gain says nothing
LITTLE = 0.1  # gain over the template, where there is room, that is out of reach of sites that learn little
REACHED = 0.25  # share of the range from chance to 100 % at which a backbone does know the pictures, once trained
RISEN = 0.01  # rise of the accuracy in the last quarter of the rounds, or more, that promises a further one
FEWEST = 3  # images of a site that are wrong now and were right by the template, net, before the site is named
TUNE = "`promptfed tune RUN.yaml --methods auto` compares methods and rates on held-out training images"
CALIBRATED = 0.05  # an error of confidence that nobody minds


class CountedUpdate(BaseModel):
    """An update that counted."""

    client: str
    sha256: str
    weight: float


class SpentPrivacy(BaseModel):
    """What a client's releases in this federation have cost so far, at ``delta``; ``seeded`` noise guarantees nothing.

    ``epsilon`` and ``epsilon_replace_one`` are computed by the coordinator, from the noise and the number of units that
    the client has declared; null of a release that was stored without. Those of the ledger are the client's own word.
    """

    epsilon: float | None = Field(description="zero-out: neighbours differ in a unit whose contribution is nothing")
    epsilon_replace_one: float | None = Field(
        default=None, description="of neighbours one of whose units is another one"
    )
    delta: float
    noise_multiplier: float
    noise: Literal["secret", "seeded"]
    ledger_epsilon: Annotated[
        float, Field(ge=0, le=MOST_EPSILON, description="of the site's ledger, which counts all its federations")
    ]
    ledger_epsilon_replace_one: float | None = Field(default=None, ge=0, le=LARGEST_EPSILON)


class CentralPrivacy(BaseModel):
    """What a phase's mean was noised with, and what all so far have cost, for a whole client.

    It covers the states. Lengths, cosines and metrics of single updates are for the operator only, not covered by ε.
    ``epsilon`` is of zero-out neighbours, against whoever knows who took part.
    """

    epsilon: float
    epsilon_replace_one: float | None = Field(
        default=None, description="of neighbours one of whose clients is another one"
    )
    epsilon_if_secret: float | None = Field(
        default=None, description="with Poisson sampling, if nobody learns who took part"
    )
    delta: float
    clip: float
    noise_multiplier: float
    expected: float = Field(description="K̄, by which the sum is divided, whoever came")
    noise: Literal["central", "seeded"] = Field(description="seeded: simulated, a guarantee to nobody")


class UpdateReport(BaseModel):
    """An accepted update.

    ``verdict``: counted; clipped (shortened, then counted); rejected (it was there for the quorum, and the rule gave it
    no part in the aggregate); discarded (by a withdrawal); pending; or unused (never closed).
    """

    client: str
    task_id: str
    sha256: str
    bytes: int
    norm: float
    change: float | None = Field(default=None, description="L2, from the payload; null before the phase's aggregate")
    far: float | None = Field(default=None, description="how many times the median change, where it is over ten times")
    received_at: datetime
    verdict: Literal["counted", "clipped", "rejected", "discarded", "pending", "unused"]
    weight: float | None
    influence: float | None = Field(
        description="its share of the aggregate by the rule; null: no other than the weight"
    )
    distance: float | None = Field(description="L2, from the aggregate; null under the plain mean")
    metrics: dict[str, float]
    privacy: SpentPrivacy | None = None


class FailureReport(BaseModel):
    """A task that its client could not carry out."""

    client: str
    type: str
    detail: str


class StageReport(BaseModel):
    """What is common to phases and evaluations."""

    opened_at: datetime
    deadline: datetime
    closed_at: datetime | None
    completed_at: datetime | None
    seconds: float | None
    payload_sha256: str | None = Field(
        None, description="of what all clients were given; null: not all the same, or none"
    )
    asked: list[str]
    answered: list[str]
    failed: list[FailureReport]
    expired: list[str] = Field(description="asked, and silent until the end")
    withdrawn: list[str]
    bytes_up: int
    bytes_down: int
    unreadable: list[str] = Field(
        [], description="what clients have sent and is left out, as it cannot be read, and why"
    )


class MeasuredView(BaseModel):
    """What the method measured at the coordinator when the phase closed: of the phase, and of clients by name."""

    phase: dict[str, float] = {}
    clients: dict[str, dict[str, float]] = {}


class SecureReport(BaseModel):
    """An attempt at a secure sum. Of single updates nothing is known: no norm, no agreement, no verdict."""

    attempt: int
    sum_clients: int | None = Field(description="clients in the sum")
    sum_weight: float | None
    mean_norm: float | None = Field(description="L2 norm of the mean change")
    privacy: dict[str, SpentPrivacy] | None = left_out(
        None, "of differential privacy: what each masked change has made of its client's ledger"
    )


class PhaseReport(StageReport):
    """One phase of a round."""

    phase: str
    sample_size: int
    extended: bool
    counted: list[CountedUpdate]
    updates: list[UpdateReport]
    state_hash: str | None = Field(description="the state after this phase")
    metrics: dict[str, float] = Field(description="clients' metrics, averaged with the counted weights")
    measured: MeasuredView = Field(description="the method's own numbers, such as PLAN's attention shares γ")
    privacy: CentralPrivacy | None = left_out(None, "of a mean that the coordinator has noised")
    secure: SecureReport | None = left_out(None, "of a secure sum, one phase an attempt")


class SpentCounts(BaseModel):
    """What noisy counts cost the test images; ``count_epsilon`` each. The ledger's figure is their owner's own word."""

    epsilon: float = Field(description="of these counts alone, added up")
    ledger_epsilon: Annotated[float, Field(ge=0, le=MOST_EPSILON, description="at delta, of all federations")]
    delta: float
    count_epsilon: float
    counts: int
    noise: Literal["secret", "seeded"]


class Bounds(BaseModel):
    """The 95 % interval of an accuracy, and half of that of its gain over zero-shot."""

    low: float
    high: float
    margin: float | None = left_out(None)


class ClientEvaluation(BaseModel):
    """One client's accuracies."""

    role: Role
    domain: str | None
    splits: dict[str, SplitResult]
    zero_shot: dict[str, SplitResult]
    metrics: dict[str, float]
    withheld: bool = False  # measured, and kept by the site: accuracies depend on records, and no noise covers them
    privacy: SpentCounts | None = left_out(None, "of accuracies that are noisy counts")
    bounds: dict[str, Bounds] = left_out({}, "by test set; none of precisions and noisy counts")
    received_at: datetime

    def template_accuracy(self, split: str) -> float | None:
        """The zero-shot accuracy on a test set; that of a further classifier is reported as ``split@variant``."""
        result = self.zero_shot.get(split.partition("@")[0])
        return result.accuracy if result is not None else None

    def interval(self, split: str, task: str | None) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy on a test set; None of a precision and of noisy counts."""
        bounds = bounds_of([self], split, task)
        return None if bounds is None else (bounds.low, bounds.high)


def bounds_of(clients: Sequence[ClientEvaluation], split: str, task: str | None) -> Bounds | None:
    """Those of the mean over clients with this test set; None where one of them can have none."""
    results = [client.splits[split] for client in clients]
    if task == "multi_label" or any(client.privacy is not None for client in clients):
        return None
    pairs = [
        (client.template_accuracy(split), one.accuracy, one.num_samples)
        for client, one in zip(clients, results, strict=True)
    ]
    known = [(before, after, count) for before, after, count in pairs if before is not None]
    low, high = mean_interval([(one.accuracy, one.num_samples) for one in results])
    return Bounds(low=low, high=high, margin=gain_margin(known) if len(known) == len(pairs) else None)


class EvaluationReport(StageReport):
    """The evaluation of a round's state; means are over the clients of a role, each counting once.

    ``mean`` is that of the clients' own test images (split ``test``); ``by_split`` has every split.
    """

    clients: dict[str, ClientEvaluation]
    mean: dict[Role, dict[str, float]]
    by_split: dict[Role, dict[str, dict[str, float]]]
    bounds: dict[Role, dict[str, Bounds]] = left_out({}, "of the means, by role and test set")


class RoundReport(BaseModel):
    """Everything about one round; round 0 has no phases, only the evaluation of the initial state."""

    round: int
    state_hash: str | None
    started_at: datetime
    ended_at: datetime | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    phases: list[PhaseReport]
    evaluation: EvaluationReport | None

    @property
    def stages(self) -> list[StageReport]:
        """Phases, and the evaluation if there is one."""
        return [*self.phases, *([self.evaluation] if self.evaluation is not None else [])]


class RoundPage(BaseModel):
    """Some rounds in order; ``next`` is the following page's ``after``."""

    rounds: list[RoundReport]
    next: str | None


class ReplayedState(BaseModel):
    """A state of the round, computed again."""

    origin: str = Field(description="initial, join, or the phase that led to it")
    state_hash: str = Field(description="as it was committed")
    replayed_hash: str = Field(description="as it came out now")
    same: bool = Field(description="both are the same, and so is the state that it was computed from")


class ReplayReport(BaseModel):
    """A replayed round."""

    round: int
    states: list[ReplayedState]


@dataclass(frozen=True)
class Reached:
    """A trainer's accuracy on its own test images after a round, and the template's (fractions).

    ``noise``: the standard deviation of what was added to either of them, for privacy.
    """

    accuracy: float
    zero_shot: float | None
    images: int
    noise: float = 0.0

    @property
    def gain(self) -> float:
        """Over the template; 0 where that is unknown."""
        return self.accuracy - self.zero_shot if self.zero_shot is not None else 0.0


Curve = Mapping[int, Mapping[str, Reached]]
"""What the trainers reached, by evaluated round and by name."""


def remarks(
    spec: FederationSpec, reports: Iterable[RoundReport], classes: Sequence[int], has_rate: bool = True
) -> list[str]:
    """All remarks on a federation; ``classes``: the numbers of classes that trainers choose among, where known.

    ``has_rate``: whether its method uses the learning rate.
    """
    reports = list(reports)
    losses = [report.phases[0].metrics["loss"] for report in reports if _has_loss(report)]
    last = next((report.evaluation.clients for report in reversed(reports) if report.evaluation is not None), {})
    return remarks_on(spec, _curve(reports), losses, classes, has_rate) + unsure(last) + of_one_class(last)


def remarks_on(
    spec: FederationSpec, curve: Curve, losses: Sequence[float], classes: Sequence[int], has_rate: bool = True
) -> list[str]:
    """The same of accuracies by round, with the losses by round (empty: unknown)."""
    last = max((round for round, reached in curve.items() if reached), default=0)
    judged = {name: row for name, row in curve.get(last, {}).items() if row.zero_shot is not None}
    if not judged:
        return []
    zero_shot = fmean(row.zero_shot or 0.0 for row in judged.values())
    gains = [row.gain for row in judged.values()]
    gain, one_label = fmean(gains), spec.task == "single_label"  # a mean average precision has no such chance
    said = near_chance(zero_shot, classes, spec.backbone.model, zero_shot + gain) if one_label else []
    if last == 0:
        return said
    noise = noise_of(zero_shot, judged.values())
    if 1 - zero_shot < ROOM:
        losses = []
    rate = spec.training.learning_rate if has_rate else None
    moved = movement(gain, losses, rate, last, noise, fmean(map(abs, gains)))
    said += moved or (little(gain, zero_shot, noise, sum(row.images for row in judged.values())) if one_label else [])
    means = {round: fmean(row.accuracy for row in reached.values()) for round, reached in curve.items() if reached}
    return said + falling(judged, rate) + (rising(means, noise) if last == spec.rounds else [])


def noise_of(accuracy: float, sites: Iterable[Reached]) -> float:
    """What a change of the mean ``accuracy`` of ``sites`` must exceed to be no chance: 1.96 standard errors of pairs.

    Two images of either kind more keep it above 0 where all or none are right (Agresti and Coull).
    """
    tested = [site for site in sites if site.images]
    if not tested:
        return 1.0
    images = sum(site.images for site in tested)
    share = (accuracy * images + 2) / (images + 4)
    variances = [share * (1 - share) / site.images + 2 * site.noise**2 for site in tested]
    return 1.96 * math.sqrt(sum(variances)) / len(tested)


def near_chance(zero_shot: float, classes: Sequence[int], backbone: str, reached: float = 0.0) -> list[str]:
    """A remark if the template is hardly more accurate than chance among the ``classes`` of each site.

    Not where training ``reached`` an accuracy that shows that the backbone does tell the pictures apart.
    """
    if not classes or min(classes) < 2:
        return []
    chance = fmean(1 / count for count in classes)
    if (zero_shot - chance) / (1 - chance) >= NEAR_CHANCE or (reached - chance) / (1 - chance) >= REACHED:
        return []
    among = f"{min(classes)}" + (f" to {max(classes)}" if max(classes) > min(classes) else "")
    measured = f"Zero-shot is right in {100 * zero_shot:.1f} %, guessing among {among} classes in {100 * chance:.1f} %"
    why = f"{backbone} hardly knows these pictures, or these names"
    return [f"{measured}: {why}. Try class names in plain English words, a template that fits, or another backbone."]


def little(gain: float, zero_shot: float, noise: float, images: int) -> list[str]:
    """A remark if sites gain little where there is room: for certain, or as far as so few ``images`` can tell."""
    if gain < 0 or 1 - zero_shot < ROOM or gain >= max(noise, MOVED):
        return []
    gained = f"{100 * gain:+.1f} points over zero-shot"
    if gain + noise < LITTLE:
        return [f"Sites learn little: {gained}, at most {100 * (gain + noise):+.1f}; {TUNE}."]
    few = f"{gained} on {counted(images, 'test image')}, where {100 * noise:.1f} can be chance"
    return [f"Too few test images to tell what sites learn: {few}. Test on more, or with several seeds."]


def movement(
    gain: float, losses: Sequence[float], rate: float | None, rounds: int, noise: float = 0.0, moved: float = 0.0
) -> list[str]:
    """A remark if training reduced the accuracy, by more than ``noise``, or changed nothing.

    ``losses`` are by round (empty: unknown). ``rate``: None where there is none to change. ``moved``: how far the
    sites' accuracies are from the template's, in the mean.
    """
    if gain < -max(WORSE, noise):
        lower = "" if rate is None else f"try a lower training.learning_rate than {rate:g}; "
        return [f"Below zero-shot by {-100 * gain:.1f} points: {lower}{TUNE}."]
    if not losses:
        return []
    learned = 1 - losses[-1] / losses[0] if losses[0] > 0 else 0.0
    if max(abs(gain), moved) < MOVED and abs(learned) < LEARNED:
        fell = f"{counted(rounds, 'round')} (loss from {losses[0]:.3f} to {losses[-1]:.3f})"
        higher = "" if rate is None else f"a higher training.learning_rate than {rate:g}, or "
        return [f"Nothing moved in {fell}: try {higher}more rounds; {TUNE}."]
    return []


def rising(means: Mapping[int, float], noise: float = 0.0) -> list[str]:
    """A remark if the mean accuracy, by evaluated round, is highest at the end and rose in the last quarter.

    The rise must exceed ``noise``.
    """
    last = max(means)
    earlier = [round for round in means if 0 < round <= 0.75 * last]
    if not earlier:
        return []
    since = max(earlier)
    rise = means[last] - means[since]
    if rise < max(RISEN, noise) or means[last] < max(means.values()):
        return []
    return [
        f"Still rising: {100 * rise:+.1f} points since round {since} of {last}. Try more rounds, as rounds: {2 * last}."
    ]


def unsure(clients: Mapping[str, ClientEvaluation]) -> list[str]:
    """A remark if the trainers' mean calibration error is more than twice the template's."""
    both = [(one.splits.get("test"), one.zero_shot.get("test")) for one in clients.values() if one.role == "trainer"]
    pairs = [(a.ece, b.ece) for a, b in both if a and b and a.ece is not None and b.ece is not None]
    if not pairs:
        return []
    now, before = (fmean(figures) for figures in zip(*pairs, strict=True))
    if now <= max(CALIBRATED, 2 * before):
        return []
    text = f"Confidence is no probability: ECE {100 * now:.1f} %, zero-shot's {100 * before:.1f} %"
    return [f"{text}. `promptfed score --fit-on DATA` finds a temperature, which `predict --temperature` takes."]


def of_one_class(clients: Mapping[str, ClientEvaluation]) -> list[str]:
    """A remark on each client whose answers are nearly all one class, though its images are not."""
    texts = []
    for name, one in sorted(clients.items()):
        test = one.splits.get("test")
        if test is not None and nearly_one_class(test.one_answer, test.majority):
            figures = "" if test.auroc is None else f" (AUROC {100 * test.auroc:.1f} %)"
            share = f"{100 * (test.one_answer or 0):.1f} % of the answers at {name} are one class{figures}"
            texts.append(f"{share}: its images are shifted as a whole, and the accuracy tells little.")
    return texts


def falling(clients: Mapping[str, Reached], rate: float | None) -> list[str]:
    """A remark if a site is clearly less accurate than the template, while most are more accurate."""
    gains = {name: row.gain for name, row in clients.items()}
    fell = [name for name, gain in gains.items() if gain < 0]
    clear = [name for name in fell if -gains[name] > WORSE and _is_clear(clients[name])]
    if not clear or 2 * sum(gain > 0 for gain in gains.values()) <= len(clients):
        return []
    worst = min(clear, key=gains.__getitem__)
    who = "One site falls" if len(fell) == 1 else f"{len(fell)} sites fall"
    text = f"{who}: {worst} is {-100 * gains[worst]:.1f} points below zero-shot, while most sites gain"
    lower = "" if rate is None else f", or a lower rate than {rate:g}"
    return [f"{text}. Try a method with a part of each site's own, such as fedpgp{lower}."]


def _is_clear(row: Reached) -> bool:
    """Whether a fall is one of some images, and beyond what was added for privacy."""
    return -row.gain * row.images >= FEWEST - 0.5 and -row.gain > 1.96 * math.sqrt(2) * row.noise


def _curve(reports: Iterable[RoundReport]) -> Curve:
    return {
        report.round: {
            name: Reached(
                client.splits["test"].accuracy,
                client.zero_shot["test"].accuracy if "test" in client.zero_shot else None,
                client.splits["test"].num_samples,
                0.0 if client.privacy is None else count_noise(client.privacy.count_epsilon, client.splits["test"]),
            )
            for name, client in report.evaluation.clients.items()
            if client.role == "trainer" and "test" in client.splits
        }
        for report in reports
        if report.evaluation is not None
    }


def count_noise(epsilon: float, tested: SplitResult) -> float:
    """The standard deviation of an accuracy whose number of right answers has discrete Laplace noise."""
    ratio = math.exp(-epsilon)
    return math.sqrt(2 * ratio) / (1 - ratio) / max(1, tested.num_samples)


def _has_loss(report: RoundReport) -> bool:
    return bool(report.phases) and "loss" in report.phases[0].metrics
