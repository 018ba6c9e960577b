"""The card of an export (`card.json`), and the facts in it that a coordinator knows itself.

Whoever writes an export takes the facts from ``GET .../rounds/{round}/card``. The coordinator compares before it signs.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field

from promptfed.shared.api.api_schemas import FederationView, SelectionView
from promptfed.shared.messages import Domain, FederationState, Figure, GreyScale, Role
from promptfed.shared.privacy.accounting import ACCOUNTANT, RELATION
from promptfed.shared.service.reasons import ID_PATTERN
from promptfed.shared.spec.section import left_out
from promptfed.shared.spec.spec import BackboneSpec, ClassName, Licence, Name, Origin, TrainingSpec

FORMAT = 1
STATE_FILE, WEIGHTS_FILE, JSON_FILE, MARKDOWN_FILE = (
    "prompts.safetensors",
    "class_weights.safetensors",
    "card.json",
    "card.md",
)
FINAL_FILE = "final.safetensors"  # the last round's state, beside the best round's
MERGED_FILE = "open_clip_model.safetensors"  # as open_clip and promptfed look for it in a folder
BACKBONE_FOLDER = "backbone"  # of weights that open_clip cannot load by name
BACKBONE_CONFIG = f"{BACKBONE_FOLDER}/open_clip_config.json"
BACKBONE_WEIGHTS = f"{BACKBONE_FOLDER}/open_clip_model.safetensors"
LISTED = frozenset(
    {STATE_FILE, FINAL_FILE, WEIGHTS_FILE, MARKDOWN_FILE, MERGED_FILE, BACKBONE_CONFIG, BACKBONE_WEIGHTS}
)
"""Files that a card may name. A closed list: no path leaves the folder, and nothing in it is code."""
SIGNATURE_FILE = "card.json.sig"  # the coordinator's signature of card.json, in hexadecimal
SPEC_NAMES, TRAINER_NAMES, GIVEN_NAMES = "the federation's spec", "the federation's trainers", "who exported it"
MOST_CARD_BYTES = 8 << 20  # what a coordinator reads of a JSON body
OF_TOWERS = {"checkpoint": None, "transport": "float32", "cache_blocks": False, "private": "none", "hessian": False}

GONE: dict[str, dict[str, Any]] = {
    "fedapt": {"adaptive": True, "mixture": "soft"},
    "fedbabu": {"finetune": "all"},
    "fedclipadapter": {"sides": "image", "beta": 0.2},
    "fedlora": {"aggregation": "average", "scaling": "root", "matrices": "qkv"},
    "fedotp": {"transport": "unbalanced", "pooled_weight": 0.0},
    "fedrep": {"refit_epochs": 0},
    "pfedmoap": {"selection": "nearest", "similarity": "dot"},
    "pfedprompt": {"memory": "labels", "kappa": None, "query": "pooled", "train_with_memory": False},
    "promptfl_amp": {"similarity": "distance"},
}
"""Options of promptfed 0.3.0 that are gone, with the values at which a method is today's."""


class FederationName(BaseModel):
    """Which federation a result is of, and how it stood."""

    name: Name
    id: Annotated[str, Field(pattern=ID_PATTERN)]
    state: FederationState


class Participant(BaseModel):
    """A client, by its name or its number."""

    name: str
    role: Role
    domain: str | None
    num_samples: int
    num_classes: int
    updates_counted: int | None = Field(description="null where it is secret who took part")
    grey: GreyScale = None


class MeasuredAccuracy(BaseModel):
    """What a client measured on one of its test sets, or on a variant of it (fractions)."""

    client: str
    role: Role
    split: str
    adapted: float
    zero_shot: float | None
    num_samples: int
    interval: tuple[float, float] | None = left_out(default=None, description="of `adapted`, 95 %")
    ece: Figure = None
    macro_f1: Figure = None
    auroc: Figure = None
    majority: Figure = None
    one_answer: Figure = None


class Accuracies(BaseModel):
    """What clients measured last; ``mean`` is by role, over the clients' own test images."""

    round: int
    clients: list[MeasuredAccuracy]
    mean: dict[str, dict[str, float]]


class SumsSummary(BaseModel):
    """Of a result whose changes only came as sums: clients of the smallest one, and the share that opens one."""

    smallest_sum: int | None
    threshold: float


class PrivacySummary(BaseModel):
    """Differential privacy of a result: what this federation has cost its clients, at their largest δ.

    The coordinator computes ε from the noise, of which the least is told, and the numbers of units that clients have
    declared; null where it has not. ``ledger_epsilon_max`` is the largest that a client's ledger is said to hold over
    all its federations, by the clients' own word. At level client ε is the same for each of the ``clients`` expected,
    and noise is ``central``.

    ``relation``: neighbours differ in one unit whose contribution is nothing; ``epsilon_replace_one`` is that of
    neighbours one of whose units is another one, the largest of any client. Both hold against whoever knows who took
    part; ``epsilon_if_secret``, of Poisson sampling, only against who learns nothing of it. ``seeded`` noise guarantees
    nothing.
    """

    level: str
    unit: str
    relation: str = RELATION
    epsilon_max: float | None
    epsilon_median: float | None
    epsilon_replace_one: float | None = None
    epsilon_if_secret: float | None = left_out(None)
    ledger_epsilon_max: float | None = left_out(None)
    clients: int
    delta: float | None
    clip: float | None
    noise_multiplier: float | None
    noise: str
    accountant: str = ACCOUNTANT
    rounds_counted: int
    evaluation: str


class Traffic(BaseModel):
    """Bytes of all updates and of all payloads."""

    up: int
    down: int


class Hashes(BaseModel):
    """``sha256:<hex>`` of the state, the backbone's weights and the spec's canonical JSON."""

    state: str
    backbone: str | None
    spec: str | None


def classes_of(federation: FederationView) -> tuple[list[str] | None, str | None]:
    """The federation's class names and who gave them; None of both where each client has its own."""
    if federation.spec.class_names is not None:
        return federation.spec.class_names, SPEC_NAMES
    return federation.class_names, TRAINER_NAMES if federation.class_names else None


def _of_today(method: dict[str, Any]) -> dict[str, Any]:
    """The method without what promptfed 0.3.0 wrote there and nothing reads now."""
    gone = OF_TOWERS | GONE.get(str(method.get("name")), {})
    kept = {key: value for key, value in method.items() if key not in gone or value != gone[key]}
    kept.pop("statistics", None)
    return kept


class Facts(BaseModel):
    """What the coordinator knows of a result, and compares before it signs a card."""

    format: int = FORMAT
    federation: FederationName
    method: Annotated[dict[str, Any], AfterValidator(_of_today)]
    summary: str
    paper: str
    backbone: BackboneSpec
    template: str
    round: int
    rounds: int
    training: TrainingSpec
    seed: int
    domains: list[Domain]
    participants: list[Participant]
    origin: Origin | None = left_out(None, "the export that the federation started from")
    licence: Licence | None = left_out(None)
    selection: SelectionView | None = left_out(None, "how the round was chosen, if it is the one")
    stopped: str | None = left_out(None, "why the federation ended before its rounds did")
    accuracy: Accuracies | None
    unreadable: int = left_out(0, "answers of clients that could not be read, and count nowhere")
    privacy: PrivacySummary | None = None
    secure_aggregation: SumsSummary | None = left_out(None)
    bytes: Traffic | None = Field(description="null where it is secret who took part, which they would tell")
    hashes: Hashes

    def numbered(self) -> Self:
        """The same with clients that are numbered, in the order of their names, instead of named."""
        shown = {one.name: f"client {number}" for number, one in enumerate(self.participants, 1)}
        participants = [one.model_copy(update={"name": shown[one.name]}) for one in self.participants]
        accuracy = self.accuracy
        if accuracy is not None:
            rows = [row.model_copy(update={"client": shown.get(row.client, row.client)}) for row in accuracy.clients]
            accuracy = accuracy.model_copy(update={"clients": rows})
        return self.model_copy(update={"participants": participants, "accuracy": accuracy})


class Use(BaseModel):
    """What can classify with the export."""

    open_clip: bool
    promptfed: bool
    why_not_open_clip: str | None


class TensorShape(BaseModel):
    """A tensor of a safetensors file."""

    shape: list[int]
    dtype: str


class CardFile(BaseModel):
    """One file of the export."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tensors: dict[str, TensorShape] | None = left_out(None)


class Made(BaseModel):
    """When and with which promptfed the export was written, by the word of who wrote it."""

    at: Annotated[str, Field(max_length=100)]
    promptfed: Annotated[str, Field(max_length=100)]


class Card(Facts):
    """The card as ``card.json`` holds it: the facts, the classes, and every other file with its digest."""

    class_names: list[ClassName] | None
    class_names_from: str | None
    use: Use
    files: dict[str, CardFile]
    made: Made
    signature: str | None = left_out(
        None, "of earlier exports: over the federation's id, the round and the state's hash, and nothing else"
    )
