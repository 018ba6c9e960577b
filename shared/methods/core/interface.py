"""What a method implements, and what its two halves are given: images, classifiers, clients and contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared import seeds
from promptfed.shared.errors import BadInput
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.objectives import LabelLoss, Protection
from promptfed.shared.methods.core.text_features import same_in_a_text, template_features
from promptfed.shared.plain_text import quoted
from promptfed.shared.seeds import Draws
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Shape, Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

SHARE = "domain_share:"  # before a domain's name: its mean share of a client's test images


LabelSpace = Annotated[
    Literal["federation", "client"],
    Field(
        description="classes that are told apart on a client's own images: the federation's where the spec names them, "
        "or the client's own"
    ),
]

STEPS = ("batch_size", "optimizer", "learning_rate", "momentum", "weight_decay", "schedule")
"""Fields of the spec's training that say how gradient steps over batches are taken."""


class Split(Protocol):
    """Labelled images of one client: features come from its cache, images from its disk."""

    @property
    def labels(self) -> Tensor:
        """``(N,)`` int64, indices in the label space of the task."""

    def __len__(self) -> int: ...

    def features(self) -> Tensor:
        """``(N, d_e)`` float32, L2-normalised, from the frozen image tower, on the backbone's device."""

    def raw_features(self) -> Tensor:
        """The same features without normalisation."""

    def images(self, indices: Tensor, /) -> Tensor:
        """``(B, 3, H, W)`` preprocessed images at ``indices (B,)``, on the backbone's device."""

    def patches(self, indices: Tensor, /) -> Tensor:
        """``(B, M, d_e)`` float32, L2-normalised features of the patches of the images at ``indices (B,)``.

        They are cached on the client's disk in float16, for methods that need them, and returned on the backbone's
        device.
        """


class Classifier(Protocol):
    """Scores images against class names."""

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits, already divided by the temperature, of the images at ``indices (B,)``."""


@runtime_checkable
class Fixed(Protocol):
    """A classifier with fixed text features, which can be used without promptfed."""

    def weights(self) -> Tensors | None:
        """The weights for normalised image features I ``(B, d_e)`` of the frozen tower in plain code.

        Either ``class_weights (C, d_e)`` W with logits τ⁻¹·I·Wᵀ; or ``class_weights (k, C, d_e)`` of k domains, where
        an image uses the domain at the argmax of I·``domain_weight (k, d_e)``ᵀ + ``domain_bias (k,)``. None if texts
        depend on the image in another way.
        """


@runtime_checkable
class Mixes(Protocol):
    """A classifier that estimates the domains of an image."""

    domain_names: tuple[str, ...]

    def shares(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, k)`` shares of the domains in ``domain_names``, which sum to 1, of the images at ``indices (B,)``."""


@dataclass(frozen=True)
class Disclosed:
    """Information about a client's data that participation reveals: ``what`` (a clause), and to whom."""

    to: Literal["operator", "sites"]
    what: str


AGGREGATE = Disclosed("sites", "the aggregate of all updates, in which this client's has its share")


class Hyperparameters(BaseModel):
    """Base of every method's hyperparameters: documented, bounded, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    label_space: LabelSpace = "federation"


def defaults(
    rounds: int | None = None, sections: Mapping[str, Any] | None = None, **training: float | str
) -> dict[str, Any]:
    """A spec's ``rounds``, ``training`` and other ``sections``, such as aggregation; omitted ones are left out."""
    settings = {"rounds": rounds, "training": training} | dict(sections or {})
    return {name: value for name, value in settings.items() if value}


class MethodError(BadInput, ValueError):
    """A method cannot run under these conditions; the text gives the problem and a remedy."""


class NeedsBackbone(MethodError):
    """The initial state needs a backbone (a context made of words). The command creates it and PUTs it."""


@dataclass(frozen=True)
class Needs:
    """The requirements of a method.

    ``patch_tokens``: patch features, which need hundreds of times more disk space than pooled features.
    ``domain_descriptions``: every trainer must describe its domain. ``join_when_extended``: newcomers may join when a
    round's first phase gets its second deadline; False if the shape of an update depends on the participants.
    """

    text_tower: bool = True
    vision_transformer: bool = False
    domain_descriptions: bool = False
    join_when_extended: bool = True
    cached_features: bool = True
    patch_tokens: bool = False


@dataclass(frozen=True)
class Phase:
    """One exchange of a round: tensors ``down`` to clients, tensors ``up`` to the coordinator.

    ``ask``: the clients of a later phase: those whose answer to the first phase was counted, or all active trainers.
    The first phase of a round always asks the sampled clients. ``mean``: the state after the phase depends on the
    updates only through their mean, so that a robust rule may replace the mean.
    """

    name: str
    down: tuple[TensorSpec, ...]
    up: tuple[TensorSpec, ...]
    ask: Literal["answered", "all"] = "answered"
    mean: bool = False


@dataclass(frozen=True)
class ClientInfo:
    """An enrolled client as the server half sees it."""

    name: str
    role: Literal["trainer", "evaluator"]
    num_samples: int
    class_names: tuple[str, ...]
    domain: Domain | None = None
    active: bool = True  # False once the operator has withdrawn it


@dataclass(frozen=True)
class ServerContext:
    """The inputs of the server half besides the state. ``clients`` are in order of name.

    ``draws_of`` makes numpy arrays in a coordinator, and torch tensors elsewhere.
    """

    training: TrainingSpec
    shape: BackboneShape
    class_names: tuple[str, ...] | None
    clients: tuple[ClientInfo, ...]
    seed: int
    rounds: int
    draws_of: seeds.DrawsOf = seeds.generator

    def draws(self, *purpose: str | int) -> Draws:
        """The draws for one purpose of the server half."""
        made: Draws = self.draws_of(self.seed, *purpose)
        return made


@dataclass(frozen=True)
class ClientUpdate:
    """One counted update; ``weight`` is the client's share of the mean (all of a phase's weights sum to 1).

    The tensors are numpy arrays in a coordinator that computes with numpy, else torch tensors.
    """

    client: str
    weight: float
    tensors: Mapping[str, Any]


Updates = Iterable[ClientUpdate]
Combine = Callable[[Updates], Tensors]


@dataclass(frozen=True)
class ClientContext:
    """The inputs of the client half for one task.

    ``terms``: the terms to which the data owner agreed. ``class_names`` are the candidate classes: the label space of
    ``train`` in training, the classes of the test set in an evaluation. ``label_space`` is always that of ``train``;
    empty means ``class_names``. ``template``: the federation's, or that of the client's data. ``count_trained``
    receives the number of values that each training loop optimises. With ``protection`` training is differentially
    private. ``label_loss``: in place of the cross-entropy, as where images have several labels. ``progress`` is told
    the part of the steps that is done.
    """

    backbone: Backbone
    terms: TrainingTerms
    class_names: tuple[str, ...]
    template: str
    client: str
    domain: Domain | None
    peers: tuple[ClientInfo, ...]
    round: int
    phase: str
    train: Split
    cancelled: Callable[[], bool] = field(default=lambda: False)
    progress: Callable[[float], None] = field(default=lambda done: None)
    count_trained: Callable[[int], None] = field(default=lambda numbers: None)
    label_space: tuple[str, ...] = ()
    protection: Protection | None = None
    label_loss: LabelLoss | None = None

    @property
    def training(self) -> TrainingSpec:
        """Epochs, batches and the optimizer."""
        return self.terms.training

    @property
    def rounds(self) -> int:
        """The last round."""
        return self.terms.rounds

    @property
    def seed(self) -> int:
        """The federation's seed."""
        return self.terms.seed

    def with_terms(self, **changes: Any) -> ClientContext:
        """The same task with other terms, for methods that train a part with their own settings."""
        return replace(self, terms=self.terms.model_copy(update=changes))

    def for_training(self) -> ClientContext:
        """The same task with the label space of ``train`` as candidates, for classifiers that are tuned first."""
        return replace(self, class_names=self.label_space or self.class_names)

    def expect_images(self) -> None:
        """Raise MethodError if there are no training images."""
        if len(self.train) == 0:
            raise MethodError(f"client {self.client!r} has no training images")

    def among_candidates(self, labels: Tensor) -> Tensor:
        """Indices ``(N,)`` of the classes of ``labels (N,)`` of ``train`` among the candidates; -1: not a candidate."""
        names, place = self.label_space or self.class_names, {name: at for at, name in enumerate(self.class_names)}
        return torch.tensor([place.get(names[label], -1) for label in labels.tolist()], dtype=torch.int64)

    def trained_rows(self) -> list[int]:
        """The index of each candidate among the classes of ``train``; -1: not trained."""
        place = {name: row for row, name in enumerate(self.label_space or self.class_names)}
        return [place.get(name, -1) for name in self.class_names]

    def for_tuning(self, epochs: int, rate: float) -> ClientContext:
        """`for_training` with a number of epochs at a constant rate, to tune a copy before it classifies."""
        settings = {"epochs": epochs, "learning_rate": rate, "schedule": "constant"}
        return self.for_training().with_terms(training=self.training.model_copy(update=settings))


@dataclass(frozen=True)
class TrainResult:
    """``update`` is sent to the coordinator, ``private`` stays on the client's disk, ``metrics`` appear in the report.

    Tensors may require gradients or be on any device; the result stores them detached and on the CPU.
    """

    update: Tensors
    private: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "update", {name: tensor.detach().cpu() for name, tensor in self.update.items()})
        object.__setattr__(self, "private", {name: tensor.detach().cpu() for name, tensor in self.private.items()})


@dataclass(frozen=True)
class Measured:
    """Numbers that the server half measured when it closed a phase: of the ``phase``, and of ``clients`` by name."""

    phase: dict[str, float] = field(default_factory=dict)
    clients: dict[str, dict[str, float]] = field(default_factory=dict)


class Method(ABC):
    """One federated method with its hyperparameters ``hyper``.

    Rare features are optional: each is a protocol of this module, which a method has or has not.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    Hyper: ClassVar[type[Hyperparameters]]
    needs: Needs = Needs()  # of the method, or of its instance if hyperparameters change it
    defaults: ClassVar[dict[str, Any]] = {}  # defaults for the spec: rounds, training, aggregation, participation
    personal: bool = False  # whether classifiers use private state, so that they differ by client
    of_names: ClassVar[bool] = False  # whether prompts are generated from the class names
    takes_evaluators: bool = True  # whether a client that trains nothing has a classifier
    one_payload: bool = True  # whether all clients of a phase, and of an evaluation, get the same tensors
    metrics: ClassVar[tuple[str, ...]] = ("loss",)  # patterns of the metrics that `train` reports; others are not sent
    evaluation_metrics: ClassVar[tuple[str, ...]] = ()  # the same of an evaluation, besides accuracies
    shares: ClassVar[tuple[str, ...]] = ()  # of these, fractions of images or steps: a site with a floor keeps them
    protects: ClassVar[bool] = False  # whether `train` can be differentially private for every record of a client
    fine_tunes: ClassVar[bool] = False  # whether classifiers are trained once more, without noise, on a client's images
    unprotected: ClassVar[str] = "its training has not been looked at for this"  # the reason why not, as a clause
    several_labels: ClassVar[bool] = False  # whether images may have several labels; not inherited
    change_per_number: ClassVar[float] = 10.0  # largest admitted root mean square of a change
    # Fields of the spec's training that change nothing: other values are refused.
    ignores: ClassVar[tuple[str, ...]] = ()

    def __init__(self, hyper: Hyperparameters):
        self.hyper = hyper

    @classmethod
    def can_protect(cls) -> bool:
        """Whether this class itself sets ``protects``. It is not inherited, since a subclass may train differently."""
        return bool(vars(cls).get("protects", False))

    @classmethod
    def can_take_several_labels(cls) -> bool:
        """Whether this class itself sets ``several_labels``, as in `can_protect`."""
        return bool(vars(cls).get("several_labels", False))

    @property
    def disclosures(self) -> tuple[Disclosed, ...]:
        """What the operator and other sites can learn about a client. The data owner reads this before joining.

        Override it if updates or payloads reveal more than an aggregate.
        """
        phases = [phase for round in (1, 2) for phase in self.phases(round, 2)]
        return (AGGREGATE,) if any(phase.up for phase in phases) else ()

    # Server half

    def check(self, spec: FederationSpec) -> None:  # noqa: B027 (most methods run with any spec)
        """Raise MethodError if the method cannot run with this spec."""

    def check_backbone(self, shape: BackboneShape) -> None:
        """Raise MethodError if a backbone of ``shape`` lacks a tower that the method needs."""
        # A CLIP model's text tower has at least positions.
        without_text = shape.d_v is not None and shape.d_t is None and shape.context_length is None
        if self.needs.text_tower and without_text:
            raise MethodError(f"{self.name} needs a text tower; this backbone has none: choose a CLIP model")
        if self.needs.vision_transformer and shape.d_v is None:
            raise MethodError(
                f"{self.name} needs a vision transformer that prompts can enter; this backbone's image tower is none"
            )
        if self.needs.patch_tokens and shape.patch_tokens is None:
            raise MethodError(
                f"{self.name} needs the features of an image's patches; this backbone's image tower gives none: choose "
                "a CLIP model with a vision transformer that pools a token or the mean, or with a CLIP ResNet"
            )

    def check_classes(self, names: tuple[str, ...]) -> None:
        """Raise MethodError if a softmax over ``names`` cannot be trained or is meaningless."""
        if len(names) < 2:
            raise MethodError(
                f"{names[0]!r} is the only class to choose from: give a label space of two classes or more"
            )
        same = same_in_a_text(names) if self.needs.text_tower else []
        if same:
            alike = ", ".join(quoted(same[:4], same))
            raise MethodError(f"to a text tower these class names are the same: {alike}; rename or merge the classes")

    @abstractmethod
    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the global state, with symbolic shapes."""

    def phases(self, round: int, rounds: int) -> tuple[Phase, ...]:
        """The phases of ``round`` (from 1). The default is one phase that exchanges all tensors clients may see."""
        shared = tuple(spec for spec in self.state_tensors() if spec.shared_with_clients)
        return (Phase("train", down=shared, up=shared, mean=bool(shared)),)

    @abstractmethod
    def dims(self, context: ServerContext) -> dict[str, int]:
        """Values of the symbols in tensor shapes. Raises MethodError if the backbone lacks one."""

    def initial_state(self, context: ServerContext, draws: Draws) -> Tensors:
        """The global state of round 0. By default every number is zero.

        Raises:
            NeedsBackbone: the state can only be made with a backbone (``initial_state_with``).
        """
        dims, xp = self.dims(context), draws.xp
        specs = self.state_tensors()
        return {spec.name: xp.zeros(spec.resolve(dims), dtype=getattr(xp, spec.dtype)) for spec in specs}

    def initial_state_with(self, backbone: Backbone, context: ServerContext, draws: Draws) -> Tensors:
        """The global state of round 0, made with a backbone."""
        return self.initial_state(context, draws)

    def payload(self, state: Tensors, phase: Phase | None, client: ClientInfo, context: ServerContext) -> Tensors:
        """The download of ``client`` in ``phase`` or for an evaluation (``phase`` is None): `payload_tensors`."""
        return {spec.name: state[spec.name] for spec in self.payload_tensors(phase)}

    def payload_tensors(self, phase: Phase | None) -> tuple[TensorSpec, ...]:
        """The tensors of `payload` in ``phase``, or in an evaluation (all shared ones). Clients refuse others."""
        if phase is not None:
            return phase.down
        return tuple(spec for spec in self.state_tensors() if spec.shared_with_clients)

    def expected_update(self, phase: Phase, client: ClientInfo, context: ServerContext) -> dict[str, tuple[Shape, str]]:
        """Shape and dtype of each tensor that ``client`` must send up in ``phase``."""
        dims = self.dims(context)
        return {spec.name: (spec.resolve(dims), spec.dtype) for spec in phase.up}

    def aggregate(
        self, state: Tensors, phase: Phase, updates: Updates, combine: Combine, context: ServerContext
    ) -> Tensors:
        """The state after ``phase``. By default the combined updates replace the tensors of the same names.

        ``updates`` are iterated in client-name order. ``combine`` is the spec's aggregation rule (by default the
        weighted mean), for methods whose phase is a mean.
        """
        return state | combine(updates) if phase.up else state

    # Client half

    @property
    def prompt_length(self) -> int:
        """The number of learned vectors before each class name, which must leave room for the name; 0: none."""
        return 0

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """Raise BackboneError if a class name is too long for this method's texts."""
        if self.needs.text_tower:
            template_features(backbone, template, class_names)
        if self.prompt_length:
            backbone.class_prompts(class_names, self.prompt_length)

    def label_space(self, federation: tuple[str, ...] | None, client: tuple[str, ...]) -> tuple[str, ...]:
        """Class names of the softmax in training and local accuracy (``hyper.label_space``)."""
        return client if federation is None or self.hyper.label_space == "client" else federation

    @abstractmethod
    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """Run one training task, starting only from committed ``private`` state."""

    @abstractmethod
    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        """This client's classifier over ``context.class_names``."""

    # What a method may have beyond: `has_own` says whether it does

    def adopt(self, state: Tensors, context: ServerContext) -> Tensors:
        """The supplied ``state`` of round 0, fitted to the clients of ``context``."""
        return state

    def admit(self, client: ClientInfo, former: ClientInfo | None, context: ServerContext) -> None:  # noqa: B027
        """Raise MethodError if ``client`` cannot enrol in addition to the active clients of ``context``.

        ``former``: the client's earlier record if it returns under its name after a reset.
        """

    def check_clients(self, context: ServerContext) -> None:  # noqa: B027
        """Raise MethodError if a federation cannot start with the clients of ``context``."""

    def join(self, state: Tensors, client: ClientInfo, context: ServerContext) -> Tensors:
        """The state after ``client`` joined a federation that has started: it may have a part for each of them."""
        return state

    def forget(self, state: Tensors, client: ClientInfo, context: ServerContext) -> Tensors:
        """The state without the data of ``client``, whose updates are deleted; the same object if there are none.

        Aggregates to which other clients contributed stay unchanged.
        """
        return state

    def measure(self, before: Tensors, phase: Phase, after: Tensors, context: ServerContext) -> Measured:
        """Finite numbers for the report of ``phase``, such as PLAN's attention shares γ, from the states around it."""
        return Measured()

    def check_domain(self, backbone: Backbone, class_names: tuple[str, ...], domain: Domain) -> None:  # noqa: B027
        """Raise BackboneError if the description of the client's ``domain`` is too long for this method's texts."""

    def prepare(self, context: ClientContext, private: Tensors) -> Tensors:
        """Private state before the first training; computed once, and again when the peers change."""
        return private

    def variants(self, context: ClientContext, payload: Tensors, private: Tensors) -> dict[str, Classifier]:
        """Classifiers that evaluations measure in addition to `classifier`, by their names in reports."""
        return {}


@runtime_checkable
class Retargets(Protocol):
    """A tuned classifier that can serve other candidate classes without being tuned again."""

    def among(self, context: ClientContext) -> Classifier:
        """The same classifier over ``context.class_names``."""


def has_own(method: Method, *names: str) -> bool:
    """Whether a method has one of these functions of its own, which `Method` leaves without effect."""
    return any(getattr(type(method), name) is not getattr(Method, name) for name in names)


def check_admission(
    method: Method, client: ClientInfo, former: ClientInfo | None, others: Callable[[], ServerContext]
) -> None:
    """Raise MethodError if ``client`` cannot enrol in addition to the active clients of ``others()``.

    ``others`` is called only if the method needs them, since there may be many.
    """
    if client.role == "evaluator" and not method.takes_evaluators:
        raise MethodError(
            f"{method.name} classifies with what each client trains: an evaluator has none; enrol it as a trainer, or "
            "take a method whose classifier is shared, such as one with head: text"
        )
    if has_own(method, "admit"):
        method.admit(client, former, others())


def why_not_alone(method: Method, others: Callable[[], ServerContext]) -> str | None:
    """Why the global state alone cannot classify; None if it can."""
    if method.personal and not method.state_tensors():
        return f"{method.name} shares nothing: each client keeps what it has learned"
    try:
        check_admission(method, ClientInfo("nobody", "evaluator", 0, ()), None, others)
    except MethodError:
        return f"{method.name} classifies with what each client keeps to itself, which the federation never sees"
    return None


def layer(name: str, *shape: str, join: str = ".") -> tuple[TensorSpec, TensorSpec]:
    """Weight ``(o, i)`` and bias ``(o,)`` of a linear layer, or ``(d,)`` both of a layer norm, by symbols."""
    return TensorSpec(f"{name}{join}weight", shape), TensorSpec(f"{name}{join}bias", shape[:1])
