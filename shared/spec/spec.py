"""The federation spec: what an operator sends to ``POST /v1/federations`` and reads back resolved.

Control commands import this module, so it stays free of torch. Method hyperparameters are validated by the method
itself (``promptfed.shared.methods.resolve_spec``), which also fills in the defaults that its paper gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import expect_visible
from promptfed.shared.service.reasons import NAME_PATTERN as NAME_PATTERN
from promptfed.shared.service.reasons import offence
from promptfed.shared.spec.section import RELEASE, Section, left_out
from promptfed.shared.spec.sections import (
    AggregationSpec,
    CompressionSpec,
    Evaluations,
    ParticipationSpec,
    PrivacySpec,
    SecureAggregationSpec,
    SelectionSpec,
)

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


def meant(model: type[BaseModel], path: Sequence[str], whole: type[BaseModel] | None = None) -> str | None:
    """The key that was probably meant by the unknown one at ``path`` of ``model``; None where none is near.

    A key of the same section that is written alike, or whose initials these are (``lr``), is told by its name. Else it
    is one of this very name, or with these initials, elsewhere in ``whole`` (default: ``model``), by its dotted path:
    ``training.epochs``.
    """
    *parents, key = path
    section = _section(model, parents)
    if section is not None:
        near = get_close_matches(key, section.model_fields, n=1)
        near += [name for name in section.model_fields if key == _initials(name)]
        if near:
            return near[0]
    places = {place: place.rpartition(".")[2] for place in _paths(whole or model)}
    return next((place for place, name in places.items() if key in (name, _initials(name))), None)


def _initials(name: str) -> str | None:
    """``lr`` for ``learning_rate``; None for a single word."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else None


def _section(model: type[BaseModel] | None, path: Sequence[str]) -> type[BaseModel] | None:
    for part in path:
        model = _model_of(model, part) if model is not None and part in model.model_fields else None
    return model


def _model_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = model.model_fields[name].annotation
    return next(
        (part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, BaseModel)), None
    )


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in model.model_fields:
        yield prefix + name
        section = _model_of(model, name)
        if section is not None:
            yield from _paths(section, f"{prefix}{name}.")


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

    d_t: Annotated[Width | None, Field(description="width of the text tower, if prompts can enter it")] = None
    d_v: Annotated[Width | None, Field(description="width of the vision tower, if prompts can enter it")] = None
    d_e: Annotated[Width, Field(description="dimension of the joint embedding")]
    text_layers: Depth | None = None
    vision_layers: Depth | None = None
    context_length: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    patch_size: Annotated[
        Annotated[int, Field(ge=1, le=4096)] | None, Field(description="side of the vision tower's patches, in pixels")
    ] = None
    patch_tokens: Annotated[
        Annotated[int, Field(ge=1, le=1 << 16)] | None,
        Field(
            description="number of patches of an image that have a feature in the joint space, if the tower gives them"
        ),
    ] = None
    mlp_width: Annotated[
        Annotated[int, Field(ge=1, le=1 << 18)] | None,
        Field(description="width of the perceptrons in the vision tower's blocks, if its weights can be trained"),
    ] = None
    positions: Annotated[
        Annotated[int, Field(ge=1, le=1 << 16)] | None,
        Field(description="number of positional embeddings of the vision tower, including that of [cls]"),
    ] = None
    heads_v: Annotated[Depth | None, Field(description="attention heads of the vision tower")] = None
    heads_t: Annotated[Depth | None, Field(description="attention heads of the text tower")] = None

    def differences(self, other: BackboneShape) -> str:
        """Where ``other`` has another size than is known here, as ``d_t 64 instead of 32``; empty: nowhere."""
        sizes = other.model_dump()
        known = {key: size for key, size in self.model_dump().items() if size not in (None, sizes[key])}
        return ", ".join(f"{key} {sizes[key]} instead of {size}" for key, size in known.items())


class BackboneSpec(Section):
    """The frozen model that every client loads for itself."""

    model: Annotated[str, Field(min_length=1, max_length=200), Visible] = "promptfed-photo"
    pretrained: Annotated[str, Field(min_length=1, max_length=200), Visible] | None = "embedded"
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    fingerprint: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    shape: BackboneShape | None = None


class TrainingSpec(Section):
    """Local training of one task. The optimizer is fresh for every client and task."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 32
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 0.002
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 5e-4
    schedule: Literal["constant", "cosine"] = "cosine"
    augmentation: Annotated[
        Literal["none", "crop_flip"],
        left_out(
            "none", description="crop_flip: random crops and flips of training images, as in the code of CoOp and MaPLe"
        ),
    ] = "none"
    views: Annotated[
        int,
        left_out(
            VIEWS,
            ge=1,
            le=1024,
            description="number of views of each image, if crop_flip is used and image features are kept",
        ),
    ] = VIEWS
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    deterministic: bool = False
    tf32: Annotated[
        bool,
        left_out(
            False,
            description="GPUs that can do so multiply float32 numbers in TF32: faster, to three digits",
        ),
    ] = False


class EvaluationSpec(Section):
    """``every``: rounds between evaluations, besides the one before round 1 and the one after the last round."""

    every: Annotated[int, Field(ge=1, le=100_000)] = 1


class AdmissionSpec(Section):
    """Limits on a client's update: the bytes of its body, and the L2 norm of its change.

    The change is what differs from the payload. ``max_update_norm`` null: the method's ``change_per_number`` times the
    square root of how many numbers the update has.
    """

    max_bytes: Annotated[int, Field(ge=1024, le=1 << 31)] = 64 << 20
    max_update_norm: Annotated[float, Field(gt=0)] | None = None


class Origin(Section):
    """The export whose state a federation starts from."""

    card: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", description="digest of its card.json")]
    federation: Annotated[str, Field(max_length=200, description="the federation that it is the result of"), Visible]
    licence: Annotated[Licence | None, Field(description="of that result")] = None


class FederationSpec(Section):
    """One run, resolved: a method with its hyperparameters, a backbone, rounds, participation rules, a seed."""

    name: Name
    method: dict[str, Any]
    backbone: BackboneSpec = BackboneSpec()
    task: Annotated[
        Literal["single_label", "multi_label"],
        left_out("single_label", description="multi_label: any number of the classes may be present in an image"),
    ] = "single_label"
    class_names: ClassNames | None = None
    template: Template | None = "a photo of a {}."  # none: each data source's own
    continues: Annotated[
        StateHash | None,
        left_out(description="state hash of an earlier federation's export, which this one has to start from"),
    ] = None
    origin: Annotated[Origin | None, left_out(description="that export, as its card says it")] = None
    licence: Annotated[Licence | None, left_out(description="of the result; its card says it")] = None
    rounds: Annotated[int, Field(ge=0, le=100_000)] = 10  # 0: the state that it `continues` is evaluated
    training: TrainingSpec = TrainingSpec()
    participation: ParticipationSpec = ParticipationSpec()
    compression: Annotated[
        CompressionSpec, left_out(CompressionSpec(), description="how clients' changes are encoded on their way")
    ] = CompressionSpec()
    aggregation: AggregationSpec = AggregationSpec()
    secure_aggregation: Annotated[SecureAggregationSpec | None, left_out()] = None
    evaluation: EvaluationSpec = EvaluationSpec()
    admission: AdmissionSpec = AdmissionSpec()
    privacy: Annotated[PrivacySpec, left_out(PrivacySpec())] = PrivacySpec()
    retention: Literal["all", "last_round"] = "all"
    start: Literal["manual", "when_ready"] = "manual"
    selection: Annotated[
        SelectionSpec | None, left_out(description="the result is the best round's; default: the last round's")
    ] = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0

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
