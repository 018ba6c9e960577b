"""The card of an export (`card.json`), and the facts in it that a coordinator knows itself.

Whoever writes an export builds the facts from the coordinator's answers. The coordinator builds them again from its
store, with the same functions, before it signs the card.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from promptfed.shared.api.api_schemas import ClientView, FederationView, SelectionView
from promptfed.shared.api.report_schemas import CentralPrivacy, EvaluationReport, RoundReport, SpentPrivacy
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import FIGURES, Domain, FederationState, Figure, GreyScale, Role
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
MERGED_FILE = "open_clip_model.safetensors"  # as open_clip and promptfed look for it in a folder
BACKBONE_FOLDER = "backbone"  # of weights that open_clip cannot load by name
BACKBONE_CONFIG = f"{BACKBONE_FOLDER}/open_clip_config.json"
BACKBONE_WEIGHTS = f"{BACKBONE_FOLDER}/open_clip_model.safetensors"
LISTED = frozenset({STATE_FILE, WEIGHTS_FILE, MARKDOWN_FILE, MERGED_FILE, BACKBONE_CONFIG, BACKBONE_WEIGHTS})
"""Files that a card may name. A closed list: no path leaves the folder, and nothing in it is code."""
SIGNATURE_FILE = "card.json.sig"  # the coordinator's signature of card.json, in hexadecimal
TEMPLATE = "a photo of a {}."
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
    epsilon_if_secret: float | None = left_out(default=None)
    ledger_epsilon_max: float | None = left_out(default=None)
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
    origin: Origin | None = left_out(default=None, description="the export that the federation started from")
    licence: Licence | None = left_out(default=None)
    selection: SelectionView | None = left_out(default=None, description="how the round was chosen, if it is the one")
    accuracy: Accuracies | None
    unreadable: int = left_out(0, default=0, description="answers of clients that could not be read, and count nowhere")
    privacy: PrivacySummary | None = None
    secure_aggregation: SumsSummary | None = left_out(default=None)
    bytes: Traffic | None = Field(description="null where it is secret who took part, which they would tell")
    hashes: Hashes


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
    tensors: dict[str, TensorShape] | None = left_out(default=None)


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
        default=None,
        description="of earlier exports: over the federation's id, the round and the state's hash, and nothing else",
    )


class Tally:
    """What the rounds of a federation add up to. Reports are added one by one: together they can fill the memory."""

    def __init__(self, reports: Iterable[RoundReport] = ()):
        self.up = self.down = self.rounds_counted = self.states = self.unreadable = 0
        self.counted: Counter[str] = Counter()
        self.measured: tuple[int, EvaluationReport] | None = None
        self.spent: dict[str, SpentPrivacy] = {}
        self.central: CentralPrivacy | None = None
        self.smallest_sum: int | None = None
        for report in reports:
            self.add(report)

    def add(self, report: RoundReport) -> None:
        """Add the next round's report."""
        self.up += report.bytes_up
        self.down += report.bytes_down
        self.rounds_counted += any(phase.counted for phase in report.phases)
        self.states += any(phase.state_hash for phase in report.phases)
        self.unreadable += sum(len(stage.unreadable) for stage in report.stages)
        for phase in report.phases:
            self.counted.update(update.client for update in phase.counted)
            self.spent |= {update.client: update.privacy for update in phase.updates if update.privacy is not None}
            self.central = phase.privacy or self.central
            if phase.secure is not None:
                self.spent |= phase.secure.privacy or {}
                sizes = [size for size in (self.smallest_sum, phase.secure.sum_clients) if size is not None]
                self.smallest_sum = min(sizes, default=None)
        if report.evaluation is not None and report.evaluation.clients:
            self.measured = report.round, report.evaluation

    def sums(self, view: FederationView) -> SumsSummary | None:
        """What the secure sums were; None where changes came in the clear."""
        given = view.spec.secure_aggregation
        return None if given is None else SumsSummary(smallest_sum=self.smallest_sum, threshold=given.threshold)

    def privacy(self, view: FederationView) -> PrivacySummary | None:
        """What protected training has cost the clients; None where nothing was protected."""
        given = view.spec.privacy
        if given.level == "none":
            return None
        if given.level == "client":
            return self._of_clients(view)
        spent = self.spent.values()
        epsilons = _of_all([client.epsilon for client in spent])
        replaced = _of_all([client.epsilon_replace_one for client in spent])
        return PrivacySummary(
            level=given.level,
            unit=given.unit,
            clip=given.clip,
            epsilon_max=max(epsilons, default=None),
            epsilon_median=median(epsilons) if epsilons else None,
            epsilon_replace_one=max(replaced, default=None),
            ledger_epsilon_max=max((client.ledger_epsilon for client in spent), default=None),
            clients=len(spent),
            delta=max((client.delta for client in spent), default=None),
            noise_multiplier=min((client.noise_multiplier for client in spent), default=None),
            noise="seeded" if any(client.noise == "seeded" for client in spent) else "secret",
            rounds_counted=self.rounds_counted,
            evaluation=view.spec.evaluations,
        )

    def _of_clients(self, view: FederationView) -> PrivacySummary:
        """What noise at the coordinator has cost, by the last state."""
        given, last = view.spec.privacy, self.central
        return PrivacySummary(
            level=given.level,
            unit="client",
            clip=given.clip,
            epsilon_max=last.epsilon if last is not None else None,
            epsilon_median=last.epsilon if last is not None else None,
            epsilon_replace_one=last.epsilon_replace_one if last is not None else None,
            epsilon_if_secret=last.epsilon_if_secret if last is not None else None,
            clients=view.privacy.clients if view.privacy is not None else 0,
            delta=given.delta,
            noise_multiplier=given.noise_multiplier,
            noise=last.noise if last is not None else "central",
            rounds_counted=self.states,
            evaluation=view.spec.evaluations,
        )


def _of_all(figures: list[float | None]) -> list[float]:
    """The figures of all clients; none where one is not known."""
    known = [figure for figure in figures if figure is not None]
    return known if len(known) == len(figures) else []


def spec_hash(spec: Mapping[str, Any]) -> str:
    """``sha256:<hex>`` of a resolved spec, as the API answers it."""
    return "sha256:" + hashlib.sha256(canonical_json(spec).encode()).hexdigest()


def facts_of(
    view: FederationView,
    clients: Sequence[ClientView],
    tally: Tally,
    hashes: Hashes,
    about: tuple[str, str],
    round: int,
    anonymous: bool = False,
) -> Facts:
    """The facts about a result.

    Args:
        view: the federation as the API answers it.
        clients: all that have enrolled, in the API's order.
        tally: of the reports up to ``round``.
        hashes: of the state after ``round`` and of the rest.
        about: the method's summary and its paper.
        round: the round after which the state is.
        anonymous: number the clients instead of naming them.
    """
    spec, secret = view.spec, view.spec.participation.is_secret
    names = sorted(client.name for client in clients)
    shown = {name: f"client {number}" if anonymous else name for number, name in enumerate(names, 1)}
    return Facts(
        federation=FederationName(name=view.name, id=view.id, state=view.state),
        method=spec.method,
        summary=about[0],
        paper=about[1],
        backbone=spec.backbone.model_copy(
            update={"fingerprint": view.backbone.fingerprint, "shape": view.backbone.shape}
        ),
        template=spec.template or TEMPLATE,
        round=round,
        rounds=spec.rounds,
        training=spec.training,
        seed=spec.seed,
        domains=[client.domain for client in clients if client.role == "trainer" and client.domain],
        participants=_participants(clients, tally, shown, secret),
        origin=spec.origin,
        licence=spec.licence,
        selection=view.selection if view.selection is not None and view.selection.round == round else None,
        accuracy=_accuracies(tally, shown),
        unreadable=tally.unreadable,
        privacy=tally.privacy(view),
        secure_aggregation=tally.sums(view),
        bytes=None if secret else Traffic(up=tally.up, down=tally.down),
        hashes=hashes,
    )


def _participants(
    clients: Sequence[ClientView], tally: Tally, shown: Mapping[str, str], secret: bool
) -> list[Participant]:
    return [
        Participant(
            name=shown[client.name],
            role=client.role,
            domain=client.domain.name if client.domain else None,
            num_samples=client.num_samples,
            num_classes=client.num_classes,
            updates_counted=None if secret else tally.counted[client.name],
            grey=client.grey,
        )
        for client in sorted(clients, key=lambda client: client.name)
    ]


def _accuracies(tally: Tally, shown: Mapping[str, str]) -> Accuracies | None:
    if tally.measured is None:
        return None
    round, report = tally.measured
    rows = []
    for name, told in sorted(report.clients.items()):
        for split, result in sorted(told.splits.items()):
            plain = split.partition("@")[0]  # a further classifier's split is reported as split@variant
            zero_shot = told.zero_shot.get(plain)
            rows.append(
                MeasuredAccuracy(
                    client=shown.get(name, name),
                    role=told.role,
                    split=split,
                    adapted=result.accuracy,
                    zero_shot=zero_shot.accuracy if zero_shot is not None else None,
                    num_samples=result.num_samples,
                    **result.figures(),
                )
            )
    return Accuracies(round=round, clients=rows, mean=_means(rows))


def _means(rows: Sequence[MeasuredAccuracy]) -> dict[str, dict[str, float]]:
    """By role, over the clients' own test images."""
    means: dict[str, dict[str, float]] = {}
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role and row.split == "test"]
        columns: dict[str, list[float]] = {
            "adapted": [row.adapted for row in own],
            "zero_shot": [row.zero_shot for row in own if row.zero_shot is not None],
            **{name: [value for row in own if (value := getattr(row, name)) is not None] for name in FIGURES},
        }
        means[role] = {name: fmean(values) for name, values in columns.items() if values}
    return means
