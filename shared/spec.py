"""The federation spec: what an operator sends to ``POST /v1/federations`` and reads back resolved.

Control commands import this module, so it stays free of torch. Method hyperparameters are validated by the method
itself (``promptfed.shared.methods.resolve_spec``), which also fills in the defaults that its paper gives.
"""

from __future__ import annotations

from collections import Counter
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from promptfed.shared.class_descriptions import ClassDescriptions, check_descriptions
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec_hints import meant

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
RESERVED: dict[str, str] = {}

Rule = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "flame"]
TOLERANT: tuple[Rule, ...] = ("trimmed_mean", "krum", "multi_krum")  # rules that have to be told how much may be bad
TOLERATE = 0.2
FLAME_NOISE = 0.001
CAPPED_FROM = 5  # clients: of fewer, one may well have most of the images
VIEWS = 8

_ADAPTIVE = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
SERVER_DEFAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "momentum": {"learning_rate": 1.0, "momentum": 0.9},
    "adagrad": {"learning_rate": 0.01, "beta1": 0.0, "tau": 1e-3},
    "adam": _ADAPTIVE,
    "yogi": _ADAPTIVE,
}

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ClassName = Annotated[str, Field(min_length=1, max_length=200)]
Width = Annotated[int, Field(ge=1, le=1 << 15)]
Depth = Annotated[int, Field(ge=1, le=256)]


class SpecError(ValueError):
    """A spec that cannot be run. ``errors`` lists ``{"path": "training.epochs", "detail": "..."}``."""

    def __init__(self, errors: list[dict[str, str]]):
        super().__init__("; ".join(f"{error['path']}: {error['detail']}" for error in errors))
        self.errors = errors

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
            detail = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                near = meant(model, [str(part) for part in item["loc"]], FederationSpec) if model is not None else None
                detail = f"unknown key; did you mean {near!r}?" if near is not None else "unknown key"
            offences.append({"path": path or "(spec)", "detail": detail})
        return cls(offences)


class Section(BaseModel):
    """Base of all spec sections: unknown keys and non-finite numbers are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class BackboneShape(Section):
    """Sizes that a coordinator without a backbone needs to make prompts: the towers' widths and the joint space's.

    A client may be the one who says them, and tensors are made of these sizes, so they have bounds, well beyond the
    towers that there are.
    """

    d_t: Annotated[Width | None, Field(description="width of the text tower, where prompts can enter it")] = None
    d_v: Annotated[Width | None, Field(description="width of the vision tower, where prompts can enter it")] = None
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
            description="patches of an image that have a feature each in the joint space, where the tower gives them"
        ),
    ] = None
    mlp_width: Annotated[
        Annotated[int, Field(ge=1, le=1 << 18)] | None,
        Field(description="width of the perceptrons in the vision tower's blocks, where its weights can be trained"),
    ] = None
    positions: Annotated[
        Annotated[int, Field(ge=1, le=1 << 16)] | None,
        Field(description="positional embeddings of the vision tower, that of [cls] among them"),
    ] = None
    heads_v: Annotated[Depth | None, Field(description="attention heads of the vision tower")] = None
    heads_t: Annotated[Depth | None, Field(description="attention heads of the text tower")] = None


class BackboneSpec(Section):
    """The frozen model that every client loads for itself."""

    model: Annotated[str, Field(min_length=1, max_length=200)] = "promptfed-tiny"
    pretrained: Annotated[str, Field(min_length=1, max_length=200)] | None = "embedded"
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
    schedule: Literal["constant", "cosine"] = "constant"
    augmentation: Annotated[
        Literal["none", "crop_flip"],
        Field(
            exclude_if=lambda kind: kind == "none",
            description="crop_flip: random crops and flips of training images, as in the code of CoOp and MaPLe",
        ),
    ] = "none"
    views: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            exclude_if=lambda views: views == VIEWS,
            description="crop_flip where image features are kept: how many views of each image there are",
        ),
    ] = VIEWS
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    deterministic: bool = False


class ParticipationSpec(Section):
    """Who is asked, how many must answer, and how long they have."""

    min_clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0
    deadline_seconds: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    on_missed_quorum: Literal["pause", "fail"] = "pause"
    draw: Annotated[
        Literal["secret", "public"],
        Field(
            exclude_if=lambda kind: kind == "secret",
            description="who is asked follows from a secret of the coordinator's, told at the end, or from the seed",
        ),
    ] = "secret"

    @property
    def least_answers(self) -> int:
        """The fewest updates that a round's first phase can close with."""
        return max(1, ceil_fraction(self.quorum, self.min_clients))


class ServerOptimizerSpec(Section):
    """A step of the coordinator's own on the mean's change: FedAvgM, FedAdagrad, FedAdam or FedYogi.

    x ← x + η·v with v ← β·v + Δ (momentum), or x ← x + η·m/(√v + τ) with m ← β₁·m + (1 − β₁)·Δ (the others).
    """

    optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = "none"
    learning_rate: Annotated[
        float | None, Field(gt=0, le=1000, description="η; default: 1 for momentum, 0.01 for the others")
    ] = None
    momentum: Annotated[float | None, Field(ge=0, lt=1, description="β of momentum; default: 0.9")] = None
    beta1: Annotated[float | None, Field(ge=0, lt=1, description="β₁; default: 0 for adagrad, else 0.9")] = None
    beta2: Annotated[float | None, Field(ge=0, lt=1, description="β₂ of adam and yogi; default: 0.99")] = None
    tau: Annotated[float | None, Field(gt=0, le=1000, description="τ, outside the root; default: 0.001")] = None

    @model_validator(mode="before")
    @classmethod
    def _what_an_optimizer_takes(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("optimizer", "none")
        if not isinstance(kind, str) or kind not in SERVER_DEFAULTS:
            return given
        own = {key: value for key, value in given.items() if value is not None}
        others = [key for key in own if key in cls.model_fields and key not in (*SERVER_DEFAULTS[kind], "optimizer")]
        if others:
            takes = ", ".join(SERVER_DEFAULTS[kind]) or "none"
            raise ValueError(f"optimizer {kind} has no {others[0]}: leave it out (it takes: {takes})")
        return {**SERVER_DEFAULTS[kind], **own}


class AggregationSpec(Section):
    """How updates become one. ``max_weight_share`` caps what one client can weigh (1: no cap).

    Numbers of samples are the clients' own word: rules other than the mean weigh all alike unless told otherwise.
    """

    weighting: Annotated[
        Literal["samples", "uniform"],
        Field(description="default: by samples for the mean, uniform for all other rules"),
    ] = "samples"
    rule: Annotated[Rule, Field(description="other rules than the mean: for methods whose phases are means")] = "mean"
    tolerate: Annotated[
        float | None,
        Field(
            gt=0,
            lt=0.5,
            validate_default=True,
            description="share of the updates that may be bad: what trimmed_mean cuts off at either end, and "
            f"f = floor(tolerate * K) of krum and multi_krum; default for these: {TOLERATE}",
        ),
    ] = None
    clip_norm: Annotated[
        Annotated[float, Field(gt=0)] | Literal["median"] | None,
        Field(
            description="longest that an update may be, as L2 distance from the state that its client began with: "
            "longer ones are shortened to it before the rule is applied; median: the median of the phase's updates"
        ),
    ] = None
    flame_noise: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            exclude_if=lambda level: level is None,
            description="λ of flame: noise on every number, in medians of the updates' lengths; default: "
            f"{FLAME_NOISE}, where the whole noise is then no longer than one of them",
        ),
    ] = None
    flame_of: Annotated[
        Literal["models", "updates"] | None,
        Field(
            exclude_if=lambda kind: kind is None,
            description="whose cosines flame clusters by: the models', as printed (default), or the updates'",
        ),
    ] = None
    max_weight_share: Annotated[
        float | None, Field(gt=0, le=1, description="null: twice its even share where five or more answer; 1: no cap")
    ] = None
    server: ServerOptimizerSpec = ServerOptimizerSpec()

    @model_validator(mode="before")
    @classmethod
    def _robust_rules_weigh_all_alike(cls, given: Any) -> Any:
        if isinstance(given, dict) and "weighting" not in given and given.get("rule", "mean") != "mean":
            return {**given, "weighting": "uniform"}
        return given

    @field_validator("tolerate")
    @classmethod
    def _only_some_rules_are_told(cls, share: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("rule") in TOLERANT:
            return TOLERATE if share is None else share
        if share is not None and "rule" in info.data:
            raise ValueError(f"the rule {info.data['rule']} takes none; {', '.join(TOLERANT)} do")
        return None

    @model_validator(mode="after")
    def _what_flame_takes(self) -> AggregationSpec:
        if self.rule != "flame":
            given = [key for key in ("flame_noise", "flame_of") if getattr(self, key) is not None]
            if given:
                raise ValueError(f"{given[0]} is of the rule flame, and this one is {self.rule}: leave it out")
        elif self.weighting != "uniform":
            raise ValueError("flame weighs all whom it accepts alike: take weighting: uniform, or leave it out")
        elif self.clip_norm is not None:
            raise ValueError("flame clips to the median of the lengths itself: leave clip_norm out")
        return self

    @field_validator("clip_norm", mode="wrap")
    @classmethod
    def _a_length_or_the_median(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError("must be a number above 0, 'median' or null") from None

    def weight_cap(self, count: int) -> float:
        """What one of ``count`` clients can weigh: numbers of samples are their own word."""
        share = self.max_weight_share
        if share is None:
            share = 2 / count if count >= CAPPED_FROM else 1.0
        return max(share, 1 / count)

    @property
    def flame_level(self) -> float:
        """λ of FLAME's noise."""
        return FLAME_NOISE if self.flame_noise is None else self.flame_noise

    @property
    def is_plain_mean(self) -> bool:
        """Whether updates become one as their weighted mean and nothing else."""
        return self.rule == "mean" and self.clip_norm is None


class SecureAggregationSpec(Section):
    """Sums that nobody sees into: the coordinator receives the sum of the clients' changes and none of its parts.

    ``threshold``: share of a phase's clients that open the sum, above a half. ``minimum``: clients of a sum, at least.
    ``step_seconds``: for each of the four exchanges after training. ``attempts``: of a phase, with the same training.
    ``neighbours``: with how many a client shares masks (default: all up to 128 clients, then what the two shares need).
    """

    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.6
    minimum: Annotated[int, Field(ge=3, le=1024)] = 3
    step_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    attempts: Annotated[int, Field(ge=1, le=5)] = 2
    neighbours: Annotated[int | None, Field(ge=4, le=1022, multiple_of=2)] = None
    colluding_share: Annotated[float, Field(ge=0, le=0.4)] = 0.1
    dropping_share: Annotated[float, Field(ge=0, le=0.4)] = 0.3


class EvaluationSpec(Section):
    """``every``: rounds between evaluations, besides the one before round 1 and the one after the last round."""

    every: Annotated[int, Field(ge=1, le=100_000)] = 1


class AdmissionSpec(Section):
    """Limits on a client's update: bytes of its body, L2 norm of its change (of the whole: 1e9, for all)."""

    max_bytes: Annotated[int, Field(ge=1024, le=1 << 31)] = 64 << 20
    max_update_norm: Annotated[float, Field(gt=0)] | None = None


class FederationSpec(Section):
    """One run, resolved: a method with its hyperparameters, a backbone, rounds, participation rules, a seed."""

    name: Name
    method: dict[str, Any]
    backbone: BackboneSpec = BackboneSpec()
    class_names: list[ClassName] | None = None
    class_descriptions: Annotated[ClassDescriptions | None, Field(exclude_if=lambda given: given is None)] = None
    template: Annotated[str, Field(max_length=500)] | None = "a photo of a {}."  # none: each data source's own
    rounds: Annotated[int, Field(ge=1, le=100_000)] = 10
    training: TrainingSpec = TrainingSpec()
    participation: ParticipationSpec = ParticipationSpec()
    aggregation: AggregationSpec = AggregationSpec()
    secure_aggregation: Annotated[SecureAggregationSpec | None, Field(exclude_if=lambda given: given is None)] = None
    evaluation: EvaluationSpec = EvaluationSpec()
    admission: AdmissionSpec = AdmissionSpec()
    privacy: Annotated[PrivacySpec, Field(exclude_if=lambda given: given.level == "none")] = PrivacySpec()
    retention: Literal["all", "last_round"] = "all"
    start: Literal["manual", "when_ready"] = "manual"
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0

    @field_validator("method")
    @classmethod
    def _method_is_named(cls, method: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(method.get("name"), str):
            raise ValueError('needs a \'name\', such as {"name": "promptfl"}')
        return method

    @field_validator("class_names")
    @classmethod
    def _class_names_are_distinct(cls, names: list[str] | None) -> list[str] | None:
        return check_class_names(names) if names is not None else None

    @field_validator("class_descriptions")
    @classmethod
    def _descriptions_are_of_classes(cls, given: ClassDescriptions | None, info: ValidationInfo) -> Any:
        if given is not None:
            check_descriptions(given, info.data.get("class_names"))
        return given

    @field_validator("template")
    @classmethod
    def _template_has_one_slot(cls, template: str | None) -> str | None:
        if template is not None and template.count("{}") != 1:
            raise ValueError("must hold '{}' exactly once, where the class name goes")
        return template


def ceil_fraction(fraction: float, count: int) -> int:
    """⌈fraction·count⌉ with the fraction as it was written: 0.7 of 10 is 7, not the 8 of binary arithmetic."""
    return int((Decimal(repr(fraction)) * count).to_integral_value(ROUND_CEILING))


def check_class_names(names: list[str]) -> list[str]:
    """Return ``names`` if there is at least one and none occurs twice; ValueError otherwise."""
    if not names:
        raise ValueError("is empty: name at least one class")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"lists a class twice: {', '.join(twice[:5])}")
    return names


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
    reserved = [{"path": key, "detail": text} for key, text in RESERVED.items() if key in raw]
    allowed = {key: value for key, value in raw.items() if key not in RESERVED}
    try:
        # Strict JSON-mode validation: a float field takes 1, but an int field does not take "1" or 1.5.
        spec = FederationSpec.model_validate(merged(defaults or {}, allowed))
    except ValidationError as error:
        raise SpecError([*reserved, *SpecError.from_validation(error, model=FederationSpec).errors]) from None
    if reserved:
        raise SpecError(reserved)
    return spec
