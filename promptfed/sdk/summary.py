"""The fields of a federation that lists and watchers read.

A coordinator of another version may have states, rules or optimizers that this promptfed does not know. Commands that
only follow a federation must not fail for that reason.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from promptfed.shared.api.api_schemas import Awaited, ClientCounts


class BackboneName(BaseModel):
    """The backbone that the spec names."""

    model: str


class BackboneSummary(BaseModel):
    """The backbone that clients must use."""

    fingerprint: str | None
    confirmed: bool


class StageSummary(BaseModel):
    """What is open. A later version may have other kinds, and leave the rest out."""

    kind: str
    round: int = 0
    phase: str = ""
    closing: bool = False


class SpecSummary(BaseModel):
    """The fields of a spec that are shown beside the state."""

    method: dict[str, object]
    rounds: int
    backbone: BackboneName


class CentralPrivacySummary(BaseModel):
    """The cost of protecting whole clients, with warnings."""

    epsilon: float
    epsilon_planned: float
    epsilon_planned_replace_one: float | None = None
    epsilon_planned_if_secret: float | None = None
    delta: float
    budget_rounds: int | None
    warnings: list[str]


class SelectionSummary(BaseModel):
    """The best round so far."""

    round: int
    metric: str
    value: float
    compared: int

    def describe(self) -> str:
        """One line for people."""
        mean = f"a mean {self.metric.replace('_', '-')} of {self.value:.1%} on held-out training images"
        return f"round {self.round} is the best of {self.compared}, with {mean}"


class FederationSummary(BaseModel):
    """One federation."""

    id: str
    name: str
    state: str
    unreadable: str | None = None
    reason: str | None
    round: int
    phase: str | None
    spec: SpecSummary
    backbone: BackboneSummary
    clients: ClientCounts
    stage: StageSummary | None = None
    answered: list[str]
    awaited: list[Awaited]
    privacy: CentralPrivacySummary | None = None
    selection: SelectionSummary | None = None


class FederationList(BaseModel):
    """A page of federations."""

    federations: list[FederationSummary]
    next: str | None


class PhaseSummary(BaseModel):
    """One phase of a round, with averaged metrics of clients; ``secure``: the updates were masked."""

    metrics: dict[str, float]
    secure: dict[str, object] | None = None


class EvaluatedClient(BaseModel):
    """A client that has evaluated; ``withheld``: it does not send its accuracies."""

    role: str
    withheld: bool = False


class EvaluationSummary(BaseModel):
    """Mean accuracies by role, on clients' own test images."""

    mean: dict[str, dict[str, float]]
    clients: dict[str, EvaluatedClient] = {}


class RoundSummary(BaseModel):
    """One round."""

    round: int
    started_at: datetime
    ended_at: datetime | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    phases: list[PhaseSummary]
    evaluation: EvaluationSummary | None

    @property
    def loss(self) -> float | None:
        """The training loss of the last phase that reports one."""
        return next((phase.metrics["loss"] for phase in reversed(self.phases) if "loss" in phase.metrics), None)

    @property
    def is_summed(self) -> bool:
        """Whether the coordinator knows only the sum of the updates."""
        return any(phase.secure is not None for phase in self.phases)

    def withholds(self, role: str) -> bool:
        """Whether the clients of a role have evaluated without sending their accuracies."""
        clients = self.evaluation.clients.values() if self.evaluation is not None else ()
        own = [client.withheld for client in clients if client.role == role]
        return bool(own) and all(own)

    def accuracy(self, role: str) -> tuple[float, float | None] | None:
        """The mean accuracy of a role's clients and that of the template; None if it was not evaluated."""
        mean = self.evaluation.mean.get(role, {}) if self.evaluation is not None else {}
        return (mean["accuracy"], mean.get("zero_shot")) if "accuracy" in mean else None


class RoundList(BaseModel):
    """A page of rounds."""

    rounds: list[RoundSummary]
    next: str | None
