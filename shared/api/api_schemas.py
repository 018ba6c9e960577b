"""What the coordinator answers in JSON, besides the messages that clients know (``promptfed.shared.messages``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from promptfed.shared import messages
from promptfed.shared.api.report_schemas import SpentPrivacy
from promptfed.shared.service.addresses import check_addresses
from promptfed.shared.spec.section import left_out, option
from promptfed.shared.spec.sections import SelectionSpec
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, Name

OperatorRole = Literal["viewer", "operator", "admin"]

LEVELS: dict[OperatorRole, int] = {"viewer": 0, "operator": 1, "admin": 2}
"""What each role may: a higher one may all that a lower one may."""

FIRST_LINK = "0" * 64
EXPIRED_AT = "when it was first seen to have expired; it stays expired if the clock is set back"

POLICY_RULES = (
    *("coordinator", "federation", "method", "backbone", "classes", "rounds", "epochs", "steps", "images", "expired"),
    *("privacy", "unit", "epsilon", "delta", "secure-aggregation", "minimum", "peers", "share", "metrics"),
)
"""What a site's policy refuses, by the last part of its name."""

FAILURES = frozenset(
    {
        "privacy-budget-exhausted",
        "privacy-missing",
        "private-state-unprotected",
        *(f"policy-{rule}" for rule in POLICY_RULES),
    }
)
"""Types of failures by which a client's budget or its site's policy refuses a task."""


class SweptTraining(BaseModel):
    """Training settings that a sweep has found for a method on one backbone."""

    model: str
    pretrained: str
    training: dict[str, Any]


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
    default_backbone: str = Field(default="promptfed-tiny", description="model of a spec that names no backbone")
    swept: list[SweptTraining] = Field(
        [], description="training of a spec that leaves the rate and the optimizer open, by its backbone"
    )
    needs: dict[str, bool]
    needs_torch: bool = Field(default=False, description="whether only a coordinator with torch can run it")
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
    progress: float | None = Field(
        default=None, description="the part of its task's steps that is done, as it has said"
    )


class StageView(BaseModel):
    """The open (or closing) phase or evaluation."""

    kind: messages.TaskKind
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
    state: messages.FederationState
    unreadable: str | None = left_out(
        None, "why this coordinator does nothing with it: stored rows that it cannot read, or an absent method"
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
    class_differences: str | None = left_out(
        None, "how the class names of trainers differ who therefore cannot start together"
    )
    draw: DrawView = DrawView(commitment=None, secret=None)
    clients: ClientCounts
    stage: StageView | None
    asked: list[str]
    answered: list[str]
    failed: list[str]
    awaited: list[Awaited]
    state_hash: str | None
    privacy: CentralPrivacyView | None = left_out(None, "where whole clients are protected")
    selection: SelectionView | None = left_out(None, "the best round so far, with selection")

    @property
    def ended_early(self) -> str | None:
        """Why it finished before its spec's rounds were over, in words."""
        if self.state != "finished":
            return None
        return "its privacy budget is spent" if self.reason == "privacy_budget" else self.reason


class FederationPage(BaseModel):
    """Some federations, oldest first; ``next`` is the following page's ``after``."""

    federations: list[FederationView]
    next: str | None


class DryRun(BaseModel):
    """A spec that would be accepted, as it would be read back."""

    spec: FederationSpec


class RunText(messages.Message):
    """The text of a run file."""

    text: Annotated[str, Field(max_length=100_000)]


class RunContent(BaseModel):
    """What a run file holds: the spec's fields, and ``clients`` where it lists them."""

    content: dict[str, Any]


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
    role: messages.Role
    status: Literal["active", "withdrawn"]
    joined: bool = Field(description="whether the state knows it; a newcomer joins when a round opens")
    reset: bool = Field(description="whether its name waits for a new secret")
    num_samples: int
    num_classes: int
    domain: messages.Domain | None
    device: str
    release: str | None = Field(default=None, description="of promptfed; null before 0.2.0")
    system: str | None = Field(default=None, description="operating system, processor, Python; null before 0.3.0")
    grey: messages.GreyScale = None
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
    sha256: str | None = left_out(None, "of a body of tensors, as it is stored")
    next: messages.Task | None = left_out(None, "the client's next task, if it asked for that")


class UpdateReceipt(Receipt):
    """An update is stored under its digest."""

    sha256: str


class RemarkList(BaseModel):
    """One sentence for each apparent problem of a federation, with advice."""

    remarks: list[str]


class Health(BaseModel):
    """Alive, or ready."""

    status: Literal["ok"]


class TokenRequest(messages.Message):
    """Whom an enrolment token shall let in, and how long."""

    hours: float | None = option(None, "default: the coordinator's setting", gt=0, le=24 * 366)
    name: Name | None = option(None, "by which it is listed; default: its id")
    role: messages.Role | None = option(None, "the only one that those may have who enrol with it")
    uses: int = option(1, "how many clients can enrol with it", ge=1, le=100_000)
    client: str | None = option(None, "the one client whose reset name it gives back; uses is 1", max_length=100)
    address: str | None = option(
        None, "where clients reach the coordinator: the answer has an invitation to it", max_length=2000
    )

    @model_validator(mode="after")
    def _one_client_is_one_use(self) -> TokenRequest:
        if self.client is not None and self.uses != 1:
            raise ValueError("a token for one client has one use: leave out uses")
        return self

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, given: str | None) -> str | None:
        return None if given is None else check_addresses(given)


class MintedToken(BaseModel):
    """An enrolment token; it is shown only here."""

    token: str
    expires_at: datetime
    id: str
    name: str
    uses: int
    role: messages.Role | None
    invitation: str | None = option(None, "for `promptfed join`, where an address was given")


class RefusedEnrolment(BaseModel):
    """Why a client could not join."""

    client: str
    type: str
    detail: str
    at: datetime


class TokenView(BaseModel):
    """An enrolment token, without its text."""

    id: str
    name: str
    role: messages.Role | None
    client: str | None = Field(description="the one reset name that it is for")
    uses: int
    used: int
    closed: bool = Field(description="a client that came by it was withdrawn: nobody new comes in by it")
    created_at: datetime
    expires_at: datetime
    expired_at: datetime | None = Field(description=EXPIRED_AT)
    clients: list[str] = Field(description="who came by it")
    refused: RefusedEnrolment | None = Field(description="who was refused last with it, and has not joined since")


class TokenPage(BaseModel):
    """Some enrolment tokens in order of id; ``next`` is the following page's ``after``."""

    tokens: list[TokenView]
    next: str | None


class OperatorRequest(messages.Message):
    """A token for an operator."""

    name: Annotated[Name, Field(description="the person's or program's, as the audit log will have it")]
    role: Annotated[OperatorRole, Field(description="viewer reads, operator steers, admin also names operators")]
    hours: float = option(24.0 * 90, "how long it is good", gt=0, le=24 * 366)


class MintedOperator(BaseModel):
    """An operator's token; it is shown only here."""

    token: str
    id: str
    name: str
    role: OperatorRole
    expires_at: datetime


class OperatorView(BaseModel):
    """An operator's token, without its text."""

    id: str
    name: str
    role: OperatorRole
    created_at: datetime
    expires_at: datetime
    expired_at: datetime | None = Field(description=EXPIRED_AT)


class OperatorPage(BaseModel):
    """Some operators' tokens in order of id; ``next`` is the following page's ``after``."""

    operators: list[OperatorView]
    next: str | None


class SigningKey(BaseModel):
    """A coordinator's public key."""

    algorithm: Literal["ed25519"] = "ed25519"
    public_key: Annotated[str, Field(description="32 bytes, in hexadecimal")]


class CardSignature(BaseModel):
    """A coordinator's signature of an export's ``card.json``, byte for byte."""

    signature: Annotated[str, Field(description="Ed25519, in hexadecimal")]
    public_key: str


class AuditEntry(BaseModel):
    """One act. ``hash`` is over all else, ``previous`` is the hash of the entry before: none can be changed alone.

    ``role``: the operator's; ``enrolment`` for who came by an enrolment token, empty for the coordinator itself.
    """

    number: int
    at: str
    actor: str
    role: str
    address: str
    act: str
    federation: str | None
    federation_name: str | None
    detail: dict[str, Any]
    previous: str
    hash: str

    def computed_hash(self) -> str:
        """SHA-256 over the canonical JSON (sorted keys, no spaces, ASCII) of all fields but ``hash``."""
        fields = self.model_dump(mode="json", exclude={"hash"})
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


class AuditPage(BaseModel):
    """Some entries in order; ``next`` is the following page's ``after``."""

    entries: list[AuditEntry]
    next: str | None


class BrokenChain(ValueError):
    """An audit log that is not what was written; the text says where."""


def check_chain(entries: Iterable[AuditEntry]) -> tuple[int, str]:
    """How many entries there are, and the last one's hash. Raises BrokenChain."""
    number, link = 0, FIRST_LINK
    for entry in entries:
        number += 1
        if entry.number != number:
            raise BrokenChain(f"entry {number} is missing: {entry.number} stands in its place")
        if entry.previous != link:
            raise BrokenChain(f"entry {number} does not follow the one before: one of them was changed or replaced")
        if entry.computed_hash() != entry.hash:
            raise BrokenChain(f"entry {number} was changed: its hash is another")
        link = entry.hash
    return number, link


class SpendView(BaseModel):
    """One release of a client's data, by its own word. ``release``: SHA-256 of the update; None inside a sum."""

    round: int
    phase: str
    task_id: str
    split: Literal["train", "test"] = "train"
    release: str | None
    events: list[messages.PrivacyEvent]
    epsilon: float = Field(description="of the client's ledger after it, by its own word")
    epsilon_replace_one: float | None = None
    delta: float
    noise: Literal["secret", "seeded"]
    at: datetime


class SpendList(BaseModel):
    """``GET .../spends``: what the coordinator knows this client to have spent, in order."""

    federation_id: str
    client: str
    spends: list[SpendView]


class ClientPrivacy(BaseModel):
    """What one client plans, by its own word, and what its releases have cost in this federation."""

    client: str
    planned: messages.EnrolledProtection | None
    spent: list[float | None] = Field(description="ε after each release, in order, as the coordinator computes it")
    last: SpentPrivacy | None = Field(description="after the last release, beside what its ledger is said to hold")


class PrivacyView(BaseModel):
    """``GET .../privacy``: differential privacy and secure sums of a federation, as its operator sees them."""

    level: Literal["none", "sample", "client"]
    withheld: int = Field(description="evaluations of which a site has kept the accuracies")
    clients: list[ClientPrivacy]
    smallest_sum: int | None = Field(description="clients in the smallest secure sum so far")
    failures: dict[str, int] = Field(description="tasks that a client's budget or policy has refused, by kind")
    warnings: list[str]
    unreadable: list[str] = Field(
        default=[], description="stored answers that are left out, as they cannot be read, and why"
    )
