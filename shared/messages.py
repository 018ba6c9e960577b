"""What coordinator and clients say to each other in JSON; tensors travel beside it (``promptfed.shared.tensors``)."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.canonical import canonical_json
from promptfed.shared.privacy.accounting import LARGEST_EPSILON, LEAST_NOISE, MOST_EPSILON, MOST_NOISE, Event
from promptfed.shared.service.reasons import ID_PATTERN
from promptfed.shared.spec.section import left_out, option
from promptfed.shared.spec.sections import Evaluations
from promptfed.shared.spec.spec import BackboneShape, ClassNames, Name, Template
from promptfed.shared.spec.training_terms import TrainingTerms

MOST_PEERS = 1000  # clients that a task describes to another client
PROBLEM_BASE = "https://promptfed.invalid/problems/"

FederationState = Literal["enrolling", "running", "paused", "finished", "failed", "cancelled"]
ENDED: tuple[FederationState, ...] = ("finished", "failed", "cancelled")
Role = Literal["trainer", "evaluator"]
TaskKind = Literal["train", "share", "mask", "confirm", "unmask", "evaluate"]
Fraction = Annotated[float, Field(ge=0, le=1)]
MOST_SAMPLES = 1 << 40
"""The most images, records or groups that anybody can name."""
Epsilon = Annotated[float, Field(ge=0, le=LARGEST_EPSILON)]
MethodPackage = Annotated[
    str | None,
    left_out(
        max_length=200,
        pattern=r"^[!-~]+$",
        description="the Python package, as name==version, that brings the method; left out for promptfed's own",
    ),
]
Id = Annotated[str, Field(pattern=ID_PATTERN)]
Release = Annotated[str | None, Field(pattern=r"^[!-~]{1,50}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]

Told = Annotated[
    Evaluations | None,
    left_out(description="of secure sums: what accuracies leave a site; the site's policy has to allow it too"),
]
IdentityKey = Annotated[str | None, left_out(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str | None, left_out(pattern=r"^[0-9a-f]{128}$")]


GreyScale = Annotated[
    tuple[float, float] | None,
    left_out(description="which numbers of the client's grey pictures of more than 8 bits are black and white"),
]
INLINE_BYTES = 64 << 10
"""The most of a payload within its task, and of an update whose receipt waits for the next task."""

Figure = Annotated[Fraction | None, left_out()]
FIGURES = ("ece", "macro_f1", "auroc", "majority", "one_answer")
TEMPLATE_ECE = "zero_shot_ece"  # the template's own, beside the `FIGURES` that an owner agrees to


class Message(BaseModel):
    """Base of all messages: unknown keys and non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Domain(Message):
    """Where a client's images come from; ``description`` has ``{}`` for the class name, as in "a sketch of a {}"."""

    name: Name
    description: Template


class EnrolledProtection(Message):
    """What a client's training will be protected by: its ``units``, records or groups, and what it has planned."""

    units: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    noise_multiplier: Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)]
    epsilon_planned: Epsilon
    delta: Annotated[float, Field(gt=0, lt=1)]


class EnrolRequest(Message):
    """``POST /v1/federations/{id}/clients``. ``secret`` (256 bits, hex) is the client's bearer token from then on."""

    name: Name
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: Role = "trainer"
    num_samples: Annotated[int, Field(ge=0, le=MOST_SAMPLES)]
    class_names: Annotated[ClassNames, Field(max_length=100_000)]
    domain: Domain | None = None
    backbone_fingerprint: Digest
    backbone_shape: BackboneShape
    device: str = Field(default="cpu", max_length=200, pattern=r"^[^\x00]*$")
    release: Release = left_out(None, "of promptfed at the client")
    system: str | None = left_out(
        None, "the client's operating system, processor and Python", pattern=r"^[ -~]{1,100}$"
    )
    identity_key: IdentityKey = option(None, "Ed25519, hex: for federations with secure sums")
    identity_proof: Signature = option(None, "its signature, purpose identity, of name and secret")

    protection: EnrolledProtection | None = left_out(None, "at privacy.level sample")
    grey: GreyScale = None

    def proof_body(self) -> dict[str, str]:
        """What ``identity_proof`` signs besides the purpose: the key is this client's, under this name."""
        return {"name": self.name, "secret_sha256": hashlib.sha256(self.secret.encode()).hexdigest()}


class EnrolResponse(Message):
    """201 (new) or 200 (the same name and secret again)."""

    client_id: Id
    federation_id: Id
    name: Name
    release: Release = left_out(None, "of promptfed at the coordinator")


class EnrolmentInfo(TrainingTerms):
    """``GET /v1/federations/{id}/enrolment`` (enrolment token): what a client must know before it can enrol."""

    federation_id: Id
    name: Name
    method_package: MethodPackage = None
    state: FederationState
    evaluate_every: Annotated[int, Field(ge=1, le=100_000)]
    evaluation: Told = None


class Peer(Message):
    """What every client is told of every other: name, role and domain, nothing about its data."""

    name: Name
    role: Role
    domain: Domain | None = None


class TaskConfig(TrainingTerms):
    """All that a client needs to carry out a task, besides the payload's tensors and its own data.

    ``peers``: the federation's active clients, for a method that needs the descriptions of their domains; else empty.
    """

    peers: list[Peer]

    def terms(self) -> str:
        """SHA-256, in hex, of all that clients of one secure sum must have been asked alike."""
        common = self.model_dump(mode="json", exclude={"peers"})
        return hashlib.sha256(canonical_json(common).encode()).hexdigest()


class PayloadRef(Message):
    """Where a task's tensors are: ``url`` is a path on the coordinator's own origin.

    ``data``: the tensors themselves in base64, if the client asked for them and they have at most 64 KB.
    """

    url: str
    bytes: int
    sha256: Digest
    data: str | None = left_out(None, max_length=4 * INLINE_BYTES // 3 + 4)


class SecurePart(Message):
    """A client's part of a secure sum: which attempt this is."""

    phase: Annotated[str, Field(max_length=100)]
    attempt: Annotated[int, Field(ge=1, le=10)]


class Task(Message):
    """``GET /v1/federations/{id}/task``: one client's part of a phase."""

    task_id: Id
    kind: TaskKind
    round: Annotated[int, Field(ge=0, le=100_000)]
    phase: Annotated[str, Field(max_length=100)]
    deadline: datetime
    seconds_left: float
    payload: PayloadRef
    config: TaskConfig
    epoch: str = Field(default="", max_length=100)
    secure: SecurePart | None = left_out(None)
    selected: int | None = left_out(None, "the round whose state is tested", ge=0, le=100_000)


class PrivacyEvent(Message):
    """``count`` uses of a mechanism (`promptfed.shared.privacy.accounting.Event`)."""

    mechanism: Literal["gaussian", "laplace"]
    q: Annotated[float, Field(gt=0, le=1)]
    z: Annotated[float, Field(gt=0, le=MOST_NOISE)]
    count: Annotated[int, Field(ge=1, le=1 << 40)]

    def event(self) -> Event:
        """For an accountant. Raises PrivacyError if it cannot be accounted for."""
        return Event(**self.model_dump())


class SpendReport(Message):
    """What an update cost its client, by its own word: events, and ε of its ledger with them, at its δ.

    ``epsilon`` is of zero-out neighbours, and no ledger takes more than `MOST_EPSILON`; ``epsilon_replace_one`` is left
    out by older clients.
    """

    events: Annotated[list[PrivacyEvent], Field(min_length=1, max_length=10)]
    epsilon: Annotated[float, Field(ge=0, le=MOST_EPSILON)]
    epsilon_replace_one: Epsilon | None = left_out(None)
    delta: Annotated[float, Field(gt=0, lt=1)]
    noise: Literal["secret", "seeded"]


class UpdateMetadata(Message):
    """Canonical JSON under the safetensors metadata key ``promptfed`` of an update."""

    task_id: Annotated[str, Field(max_length=100)]
    payload_sha256: Digest
    metrics: dict[Annotated[str, Field(max_length=100)], float] = Field(default={}, max_length=1000)
    privacy: SpendReport | None = left_out(None)


class SplitResult(Message):
    """Accuracy on ``num_samples`` test images; beside it the `FIGURES` that the site sends.

    ``accuracy``: the fraction of right answers; of images with several labels the mean average precision. ``ece`` has
    15 bins, ``macro_f1`` and ``auroc`` are means over the classes. ``majority`` and ``one_answer``: the share of the
    most frequent class, among the labels and among the answers.
    """

    accuracy: Fraction
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    ece: Figure = None
    macro_f1: Figure = None
    auroc: Figure = None
    majority: Figure = None
    one_answer: Figure = None

    def figures(self) -> dict[str, float]:
        """Those that were sent."""
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}


SplitResults = Annotated[dict[Annotated[str, Field(min_length=1, max_length=100)], SplitResult], Field(max_length=1000)]


class EvaluationRequest(Message):
    """``PUT .../tasks/{task_id}/evaluation``. ``zero_shot`` has the template's accuracy on the same splits."""

    splits: SplitResults
    zero_shot: SplitResults = {}
    metrics: dict[Annotated[str, Field(max_length=100)], float] = Field(default={}, max_length=1000)
    withheld: bool = left_out(False, "measured, and kept by the site")
    privacy: SpendReport | None = left_out(None, "what noisy counts cost the test images")


class FailureRequest(Message):
    """``POST .../tasks/{task_id}/failure``: the coordinator no longer waits for this task."""

    type: Annotated[str, Field(min_length=1, max_length=100)]
    detail: Annotated[str, Field(max_length=2000)]


class Problem(BaseModel):
    """RFC 9457 problem details. ``type`` ends in the kind of refusal, such as ``already-answered``."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None

    @property
    def kind(self) -> str:
        """The last part of ``type``."""
        return self.type.rsplit("/", 1)[-1]
