"""The federation spec: what an operator sends to ``POST /v1/federations`` and reads back resolved.

Control commands import this module, so it stays free of torch. Method hyperparameters are validated by the method
itself (``promptfed.shared.methods.resolve_spec``), which also fills in the defaults that its paper gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import expect_visible
from promptfed.shared.service.reasons import NAME_PATTERN as NAME_PATTERN
from promptfed.shared.service.reasons import offence
from promptfed.shared.spec.meant_keys import meant
from promptfed.shared.spec.section import Section, left_out, option
from promptfed.shared.spec.sections import (
    AggregationSpec,
    CompressionSpec,
    Evaluations,
    ParticipationSpec,
    PrivacySpec,
    SecureAggregationSpec,
    SelectionSpec,
    StopSpec,
)
from promptfed.shared.versions import RELEASE

TEMPLATE = "a photo of a {}."  # where a spec or a data source names none
VIEWS = 8
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Visible = AfterValidator(expect_visible)
ClassName = Annotated[str, Field(min_length=1, max_length=200), Visible]
StateHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Licence = Annotated[str, Field(min_length=1, max_length=200, description="such as CC-BY-4.0"), Visible]
Width = Annotated[int, Field(ge=1, le=1 << 15)]
Depth = Annotated[int, Field(ge=1, le=256)]

AllowedBackbones = bool | Sequence[str]
"""Names of models outside open_clip's registry that may be loaded; True: any."""


def check_class_names(names: list[str]) -> list[str]:
    """Return ``names`` if there is at least one, none occurs twice and all can be shown; ValueError otherwise."""
    if not names:
        raise ValueError("is empty: name at least one class")
    for name in names:
        expect_visible(name)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"lists a class twice: {', '.join(twice[:5])}")
    return names


def _with_one_slot(text: str) -> str:
    if text.count("{}") != 1:
        raise ValueError("must hold '{}' exactly once, where the class name goes")
    return text


ClassNames = Annotated[list[ClassName], AfterValidator(check_class_names)]
Template = Annotated[str, Field(max_length=500), Visible, AfterValidator(_with_one_slot)]
"""A text with ``{}`` where the class name goes."""


class SpecError(BadInput, ValueError):
    """A spec that cannot be run. ``errors`` lists ``{"path": "training.epochs", "detail": "..."}``."""

    def __init__(self, errors: list[dict[str, str]]):
        super().__init__("; ".join(f"{error['path']}: {error['detail']}" for error in errors))
        self.errors = errors

    def __reduce__(self) -> tuple[type[SpecError], tuple[list[dict[str, str]]]]:
        return type(self), (self.errors,)

    @classmethod
    def from_validation(
        cls, error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None
    ) -> SpecError:
        """Turn pydantic's errors into dotted paths; ``prefix`` is put before each path.

        Where ``model``, which was to be read, is given, an unknown key comes with the one that was meant.
        """
        offences = []
        for item in error.errors(include_url=False, include_context=False):
            parts = [prefix, *(str(part) for part in item["loc"])]
            path = ".".join(part for part in parts if part)
            detail = offence(item)
            if item["type"] == "extra_forbidden":
                near = meant(model, [str(part) for part in item["loc"]], FederationSpec) if model is not None else None
                detail = f"did you mean {near!r}?" if near is not None else f"promptfed {RELEASE} has none of this name"
                detail = f"unknown key; {detail}"
            offences.append({"path": path or "(spec)", "detail": detail})
        return cls(offences)


class BackboneShape(Section):
    """Sizes that a coordinator without a backbone needs to make prompts: the towers' widths and the joint space's.

    A client may be the one who says them, and tensors are made of these sizes, so they have bounds, well beyond the
    towers that there are.
    """

    d_t: Width | None = option(None, "width of the text tower, if prompts can enter it")
    d_v: Width | None = option(None, "width of the vision tower, if prompts can enter it")
    d_e: Annotated[Width, Field(description="dimension of the joint embedding")]
    text_layers: Depth | None = option(None, "blocks of the text tower")
    vision_layers: Depth | None = option(None, "blocks of the vision tower")
    context_length: int | None = option(None, "positions of the text tower", ge=1, le=1 << 20)
    patch_size: int | None = option(None, "side of the vision tower's patches, in pixels", ge=1, le=4096)
    patch_tokens: int | None = option(
        None,
        "number of patches of an image that have a feature in the joint space, if the tower gives them",
        ge=1,
        le=1 << 16,
    )
    mlp_width: int | None = option(
        None, "width of the perceptrons in the vision tower's blocks, if its weights can be trained", ge=1, le=1 << 18
    )
    positions: int | None = option(
        None, "number of positional embeddings of the vision tower, including that of [cls]", ge=1, le=1 << 16
    )
    heads_v: Depth | None = option(None, "attention heads of the vision tower")
    heads_t: Depth | None = option(None, "attention heads of the text tower")

    def differences(self, other: BackboneShape) -> str:
        """Where ``other`` has another size than is known here, as ``d_t 64 instead of 32``; empty: nowhere."""
        sizes = other.model_dump()
        sizes_here = {key: size for key, size in self.model_dump().items() if size not in (None, sizes[key])}
        return ", ".join(f"{key} {sizes[key]} instead of {size}" for key, size in sizes_here.items())


class BackboneSpec(Section):
    """The frozen model that every client loads for itself."""

    model: Annotated[str, Visible] = option(
        "promptfed-photo",
        "name of the model: one of open_clip, or `timm:NAME` for methods without text; left out, it follows from "
        "the data and the method",
        min_length=1,
        max_length=200,
    )
    pretrained: Annotated[str, Field(min_length=1, max_length=200), Visible] | None = option(
        "embedded", "weights of the model: open_clip's tag, or `embedded` for promptfed's own"
    )
    precision: Literal["fp32", "fp16", "bf16"] = option("fp32", "precision of the model: number format of its towers")
    fingerprint: StateHash | None = option(
        None, "SHA-256 of the weights; default: that of the first client that enrols"
    )
    shape: BackboneShape | None = option(None, "sizes of the towers; default: as the first client says them")


class TrainingSpec(Section):
    """Local training of one task. The optimizer is fresh for every client and task."""

    epochs: int = option(1, "passes over the images in a round", ge=1, le=10_000)
    batch_size: int = option(32, "images of a step", ge=1, le=100_000)
    optimizer: Literal["sgd", "adam", "adamw"] = option("sgd", "optimizer: a new one in a round")
    learning_rate: float = option(0.002, "learning rate; `promptfed tune` chooses one for your data", gt=0, le=1000)
    momentum: float = option(0.9, "momentum; of SGD", ge=0, lt=1)
    weight_decay: float = option(5e-4, "weight decay; of the trained tensors", ge=0, le=10)
    schedule: Literal["constant", "cosine"] = option("cosine", "course of the learning rate; over the rounds")
    augmentation: Literal["none", "crop_flip"] = left_out(
        "none", "changes of training images: crop_flip crops and flips them, as CoOp's and MaPLe's code does"
    )
    views: int = left_out(VIEWS, "views of each image; if crop_flip is used and image features are kept", ge=1, le=1024)
    threads: int = option(1, "processor threads of a task", ge=1, le=256)
    deterministic: bool = option(
        False, "the same numbers in every repetition: only deterministic algorithms, also on a GPU"
    )
    tf32: bool = left_out(False, "faster multiplication on GPUs: float32 numbers in TF32, to three digits")


class EvaluationSpec(Section):
    """``every``: rounds between evaluations, besides the one before round 1 and the one after the last round."""

    every: int = option(
        1, "rounds between evaluations; the first and the last state are always evaluated", ge=1, le=100_000
    )


class AdmissionSpec(Section):
    """Limits on a client's update: the bytes of its body, and the L2 norm of its change.

    The change is what differs from the payload. ``max_update_norm`` null: the method's ``change_per_number`` times the
    square root of how many numbers the update has.
    """

    max_bytes: int = option(64 << 20, "most bytes of an update", ge=1024, le=1 << 31)
    max_update_norm: float | None = option(None, "longest accepted change; an L2 norm", gt=0)


class Origin(Section):
    """The export whose state a federation starts from."""

    card: Annotated[
        str, Field(pattern=r"^sha256:[0-9a-f]{64}$", description="card of the result it starts from: its digest")
    ]
    federation: Annotated[
        str, Field(max_length=200, description="result it starts from: the federation's name"), Visible
    ]
    licence: Licence | None = option(None, "licence of that result")


class FederationSpec(Section):
    """One run, resolved: a method with its hyperparameters, a backbone, rounds, participation rules, a seed."""

    name: Annotated[Name, Field(description="name of the federation; at its coordinator")]
    method: Annotated[dict[str, Any], Field(description="method: its `name`, and its own options beside it")]
    backbone: BackboneSpec = BackboneSpec()
    task: Literal["single_label", "multi_label"] = left_out(
        "single_label", "labels of an image: with multi_label any number of the classes may be present"
    )
    class_names: ClassNames | None = option(None, "classes to choose among; default: each client's own")
    template: Template | None = option(
        TEMPLATE, "sentence around a class name; `{}` is the name; none: each data source's own"
    )
    continues: StateHash | None = left_out(None, "state that it continues: its hash in an earlier federation's export")
    origin: Origin | None = left_out(None, "that export, as its card says it")
    licence: Licence | None = left_out(None, "licence of the result; its card says it")
    rounds: int = option(10, "rounds: how many; 0: the state that it continues is evaluated", ge=0, le=100_000)
    training: TrainingSpec = TrainingSpec()
    participation: ParticipationSpec = ParticipationSpec()
    compression: CompressionSpec = left_out(CompressionSpec(), "how clients' changes are encoded on their way")
    aggregation: AggregationSpec = AggregationSpec()
    secure_aggregation: SecureAggregationSpec | None = left_out(None)
    evaluation: EvaluationSpec = EvaluationSpec()
    admission: AdmissionSpec = AdmissionSpec()
    privacy: PrivacySpec = left_out(PrivacySpec())
    retention: Literal["all", "last_round"] = option(
        "all", "tensors that are kept: updates, payloads and states of all rounds, or of the last one only"
    )
    start: Literal["manual", "when_ready"] = option(
        "manual", "how it begins: with `when_ready` by itself, once `min_clients` have enrolled"
    )
    selection: SelectionSpec | None = left_out(None, "the result is the best round's; default: the last round's")
    stop: StopSpec | None = left_out(
        None, "it ends once evaluations rise no more; brings `selection` with it; default: after all rounds"
    )
    seed: int = option(0, "seed of random numbers: all draws of the federation follow from it", ge=0, lt=1 << 63)

    @property
    def figure(self) -> str:
        """What an evaluation's ``accuracy`` is, as the heading of a table."""
        return "Mean average precision" if self.task == "multi_label" else "Accuracy"

    @property
    def evaluations(self) -> Evaluations:
        """What accuracies leave a site: where changes are hidden or noised none, unless ``privacy`` says otherwise."""
        if self.secure_aggregation is not None and self.privacy.evaluation is None:
            return "withheld"
        return self.privacy.evaluations

    @field_validator("method")
    @classmethod
    def _method_is_named(cls, method: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(method.get("name"), str):
            raise ValueError('needs a \'name\', such as {"name": "promptfl"}')
        return method


def merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` laid over ``defaults``, sections merged key by key."""
    result = dict(defaults)
    for key, value in given.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


def parse_spec(raw: dict[str, Any], defaults: dict[str, Any] | None = None) -> FederationSpec:
    """Validate ``raw`` over a method's ``defaults``. Hyperparameters inside ``method`` are not looked at here.

    Raises:
        SpecError: with a dotted path for every offence.
    """
    try:
        # Strict JSON-mode validation: a float field takes 1, but an int field does not take "1" or 1.5.
        return FederationSpec.model_validate(merged(defaults or {}, raw))
    except ValidationError as error:
        raise SpecError.from_validation(error, model=FederationSpec) from None
