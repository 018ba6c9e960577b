"""What the coordinator answers in JSON, besides the messages that clients know (``promptfed.shared.messages``)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from promptfed.shared.messages import Domain, FederationState, Role, TaskKind
from promptfed.shared.spec.selection import SelectionSpec
from promptfed.shared.spec.spec import BackboneShape, FederationSpec
from promptfed.shared.spec.spec_section import left_out
from promptfed.shared.tensors import Array


class SweptRate(BaseModel):
    """A learning rate that a sweep has found for a method on one backbone."""

    model: str
    pretrained: str
    learning_rate: float


class MethodView(BaseModel):
    """A method: what it does, what travels in each phase, its hyperparameters."""

    name: str
    summary: str
    paper: str
    phases: list[dict[str, Any]]
    state: list[dict[str, Any]]
    hyperparameters: dict[str, Any] = Field(description="JSON Schema, with defaults")
    defaults: dict[str, Any] = Field(description="what a spec takes from this method where it says nothing")
    change_per_number: float = Field(
        10.0,
        description="where admission.max_update_norm is open, the L2 norm of an update's change may be this times the "
        "square root of how many numbers it has",
    )
    swept_rates: list[SweptRate] = Field(
        [], description="training.learning_rate of a spec that leaves it and the optimizer open, by its backbone"
    )
    needs: dict[str, bool]
    needs_torch: bool = Field(False, description="whether only a coordinator with torch can run it")
    cached_features: bool = Field(description="whether image features may be computed once")
    metrics: list[str] = Field(description="patterns of the numbers about training that clients send beside tensors")
    disclosures: list[dict[str, str]] = Field(
        description="`what` the `operator` or other `sites` can learn of a client, beyond the names of tensors"
    )


class MethodList(BaseModel):
    """All methods."""

    methods: list[MethodView]


class Awaited(BaseModel):
    """A client whose answer is awaited."""

    name: str
    until: datetime
    progress: float | None = Field(None, description="the part of its task's steps that is done, as it has said")


class StageView(BaseModel):
    """The open (or closing) phase or evaluation."""

    kind: TaskKind
    round: int
    phase: str
    deadline: datetime | None
    seconds_left: float | None
    sample_size: int = Field(description="the round's K")
    extended: bool
    closing: bool = Field(description="closed; its aggregate is being computed")


class BackboneView(BaseModel):
    """The backbone that clients must have: the spec's, or the first enrolment's until `start` confirms it."""

    fingerprint: str | None
    shape: BackboneShape | None
    confirmed: bool


class DrawView(BaseModel):
    """What the order follows from in which clients are asked: SHA-256(secret | round | name), or of the spec's seed."""

    commitment: str | None = Field(description="SHA-256 of the secret's text; null: the spec's seed is used")
    secret: str | None = Field(description="once the federation has ended: all draws can be made again with it")


class DiskView(BaseModel):
    """What large updates and states take of the coordinator's disk at once, at most, and what is free of it."""

    needed: int
    trainers: int = Field(description="for so many: those that are enrolled, or as many as the spec asks for")
    free: int


class ClientCounts(BaseModel):
    """How many are enrolled; the withdrawn are in neither of the others."""

    trainers: int
    evaluators: int
    withdrawn: int


class CentralPrivacyView(BaseModel):
    """A federation that protects whole clients by noise at the coordinator.

    ``epsilon`` is what the states so far have cost at ``delta``, ``epsilon_planned`` what all rounds will. Both hold
    against whoever knows who took part and when; who is enrolled and numbers of images are public too. ``ratio`` is
    r, the noise's expected length over the longest mean change of ``clients`` trainers, and ``after_rounds`` ρ the same
    of all rounds together; both None until the backbone's sizes are known.
    """

    epsilon: float = Field(description="zero-out: neighbours differ in one client whose contribution is nothing")
    epsilon_replace_one: float = Field(description="replace-one: neighbours differ in one client that is another one")
    epsilon_if_secret: float | None = Field(
        description="zero-out, of Poisson sampling: only against those who learn nothing of who took part and when"
    )
    epsilon_planned: float
    epsilon_planned_replace_one: float
    epsilon_planned_if_secret: float | None
    delta: float
    clip: float
    noise_multiplier: float
    sampling: Literal["fixed", "poisson"]
    budget_rounds: int | None = Field(description="after which rounds end because of epsilon; null: no such end")
    clients: int
    ratio: float | None
    after_rounds: float | None
    warnings: list[str]


class SelectionView(SelectionSpec):
    """The round that is chosen, and how: the best mean of ``metric`` among those that were ``compared``."""

    round: int
    value: float
    compared: int


class FederationView(BaseModel):
    """One federation."""

    id: str
    name: str
    state: FederationState
    unreadable: str | None = left_out(
        default=None,
        description="why this coordinator does nothing with it: stored rows that it cannot read, or an absent method",
    )
    reason: str | None
    round: int
    phase: str | None
    spec: FederationSpec
    created_at: datetime | None = Field(description="null: it cannot be read")
    started_at: datetime | None
    ended_at: datetime | None
    backbone: BackboneView
    class_names: list[str] | None = Field(
        default=None,
        description="the spec's, or those that all trainers have named; null before the start, or where they differ",
    )
    draw: DrawView = DrawView(commitment=None, secret=None)
    disk: DiskView | None = Field(
        default=None, description="null: its updates are small, or what the backbone looks like is not known yet"
    )
    clients: ClientCounts
    stage: StageView | None
    asked: list[str]
    answered: list[str]
    failed: list[str]
    awaited: list[Awaited]
    state_hash: str | None
    privacy: CentralPrivacyView | None = left_out(default=None, description="where whole clients are protected")
    selection: SelectionView | None = left_out(default=None, description="the best round so far, with selection")


class FederationPage(BaseModel):
    """Some federations, oldest first; ``next`` is the following page's ``after``."""

    federations: list[FederationView]
    next: str | None


class DryRun(BaseModel):
    """A spec that would be accepted, as it would be read back."""

    spec: FederationSpec


class SuppliedState(BaseModel):
    """A supplied initial state."""

    state_hash: str
    bytes: int


class Nothing(BaseModel):
    """An answer without a body."""


class LastRefusal(BaseModel):
    """What a client was refused last."""

    type: str
    status: int
    detail: str
    path: str
    at: datetime


class ClientView(BaseModel):
    """An enrolled client."""

    client_id: str
    name: str
    role: Role
    status: Literal["active", "withdrawn"]
    joined: bool = Field(description="whether the state knows it; a newcomer joins when a round opens")
    reset: bool = Field(description="whether its name waits for a new secret")
    num_samples: int
    num_classes: int
    domain: Domain | None
    device: str
    release: str | None = Field(None, description="of promptfed; null before 0.2.0")
    system: str | None = Field(None, description="operating system, processor, Python; null before 0.3.0")
    enrolled_at: datetime
    last_seen: datetime | None
    refusals: int
    last_refusal: LastRefusal | None


class ClientPage(BaseModel):
    """Some clients in order of name; ``next`` is the following page's ``after``."""

    clients: list[ClientView]
    next: str | None


class Receipt(BaseModel):
    """An answer is stored."""

    task_id: str
    status: Literal["accepted", "failed"]


class UpdateReceipt(Receipt):
    """An update is stored under its digest."""

    sha256: str


class RemarkList(BaseModel):
    """One sentence for each apparent problem of a federation, with advice."""

    remarks: list[str]


class Metric(BaseModel):
    """One number; ``client`` is empty for what concerns the whole phase."""

    round: int
    phase: str
    client: str | None
    split: str | None
    name: str
    value: float


class MetricList(BaseModel):
    """Every metric by round; ``next`` is the following page's ``after`` where a ``limit`` was given."""

    metrics: list[Metric]
    next: str | None = None


class TensorView(BaseModel):
    """A tensor as nested lists."""

    dtype: str
    shape: list[int]
    data: Any

    @classmethod
    def of(cls, tensor: Array) -> TensorView:
        """The view of ``tensor``."""
        return cls(dtype=tensor.dtype.name, shape=list(tensor.shape), data=tensor.tolist())


class PromptsView(BaseModel):
    """A global state in JSON."""

    round: int
    state_hash: str
    tensors: dict[str, TensorView]


class Health(BaseModel):
    """Alive, or ready."""

    status: Literal["ok"]
