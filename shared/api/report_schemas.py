"""What the coordinator answers about rounds: phases, updates, evaluations."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from promptfed.shared.messages import Role, SplitResult, TaskKind
from promptfed.shared.spec.section import left_out


class CountedUpdate(BaseModel):
    """An update that counted."""

    client: str
    sha256: str
    weight: float


class SpentPrivacy(BaseModel):
    """What an update has made of its client's ledger, by its own word. ``seeded`` noise guarantees nothing.

    ``epsilon`` is of zero-out neighbours; that of replace-one ones is null for older clients.
    """

    epsilon: float
    epsilon_replace_one: float | None = None
    delta: float
    noise_multiplier: float
    noise: Literal["secret", "seeded"]


class CentralPrivacy(BaseModel):
    """What a phase's mean was noised with, and what all so far have cost, for a whole client.

    It covers the states. Lengths, cosines and metrics of single updates are for the operator only, not covered by ε.
    ``epsilon`` is of zero-out neighbours, against whoever knows who took part.
    """

    epsilon: float
    epsilon_replace_one: float | None = Field(None, description="of neighbours one of whose clients is another one")
    epsilon_if_secret: float | None = Field(None, description="with Poisson sampling, if nobody learns who took part")
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
    change: float | None = Field(None, description="L2, from the payload; null before the phase's aggregate")
    far: float | None = Field(None, description="how many times the median change, where it is over ten times")
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


class MeasuredView(BaseModel):
    """What the method measured at the coordinator when the phase closed: of the phase, and of clients by name."""

    phase: dict[str, float] = {}
    clients: dict[str, dict[str, float]] = {}


class SecureStepReport(BaseModel):
    """One of the five steps of a secure sum: how many were asked, and how many answered."""

    kind: TaskKind
    asked: int
    answered: int
    seconds: float | None


class SecureReport(BaseModel):
    """An attempt at a secure sum. Of single updates nothing is known: no norm, no agreement, no verdict."""

    attempt: int
    steps: list[SecureStepReport]
    sum_clients: int | None = Field(description="clients in the sum")
    sum_weight: float | None
    mean_norm: float | None = Field(description="L2 norm of the mean change")
    privacy: dict[str, SpentPrivacy] | None = left_out(
        default=None, description="of differential privacy: what each masked change has made of its client's ledger"
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
    privacy: CentralPrivacy | None = left_out(default=None, description="of a mean that the coordinator has noised")
    secure: SecureReport | None = left_out(default=None, description="of a secure sum, one phase an attempt")


class SpentCounts(BaseModel):
    """What noisy counts have made of the test images' budget, by their owner's word; ``count_epsilon`` of each."""

    epsilon: float
    delta: float
    count_epsilon: float
    counts: int
    noise: Literal["secret", "seeded"]


class ClientEvaluation(BaseModel):
    """One client's accuracies."""

    role: Role
    domain: str | None
    splits: dict[str, SplitResult]
    zero_shot: dict[str, SplitResult]
    metrics: dict[str, float]
    withheld: bool = False  # measured, and kept by the site: accuracies depend on records, and no noise covers them
    privacy: SpentCounts | None = left_out(default=None, description="of accuracies that are noisy counts")
    received_at: datetime


class EvaluationReport(StageReport):
    """The evaluation of a round's state; means are over the clients of a role, each counting once.

    ``mean`` is that of the clients' own test images (split ``test``); ``by_split`` has every split.
    """

    clients: dict[str, ClientEvaluation]
    mean: dict[Role, dict[str, float]]
    by_split: dict[Role, dict[str, dict[str, float]]]


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
