"""Sections of the federation spec: participation, aggregation, weighting, selection, compression, privacy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

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

from promptfed.shared.privacy.accounting import LEAST_DELTA, LEAST_NOISE, MOST_NOISE
from promptfed.shared.spec.section import Section, ceil_fraction, left_out

FINAL = "final-test"
"""The phase in which the chosen round's state is tested, once, after the last round."""

Rule = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"]
TOLERANT: tuple[Rule, ...] = ("trimmed_mean", "krum", "multi_krum")  # rules that have to be told how much may be bad
TOLERATE = 0.2
CAPPED_FROM = 5  # clients: of fewer, one may well have most of the images
_ADAPTIVE = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
SERVER_DEFAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "momentum": {"learning_rate": 1.0, "momentum": 0.9},
    "adagrad": {"learning_rate": 0.01, "beta1": 0.0, "tau": 1e-3},
    "adam": _ADAPTIVE,
    "yogi": _ADAPTIVE,
}
Key = TypeVar("Key", str, int)

WHOLE_WEIGHT = 1 << 16
"""The weight of the heaviest client; every client's is a whole number of 65,536ths of it, at least 1."""

Evaluations = Literal["withheld", "noisy", "plain"]


class SelectionSpec(Section):
    """Which round is exported. The clients' mean counts; of equal rounds the first is chosen."""

    metric: Annotated[Literal["accuracy", "macro_f1"], Field(description="of the clients' held-out images")] = (
        "accuracy"
    )
    split: Annotated[Literal["validation"], Field(description="what each round is measured on")] = "validation"
    share: Annotated[
        float, Field(gt=0, lt=1, description="share of each trainer's training images that is held out for it")
    ] = 0.2


def best(means: Mapping[int, float]) -> int | None:
    """The first of the rounds with the highest mean; None of none."""
    return min(means, key=lambda round: (-means[round], round), default=None)


class ParticipationSpec(Section):
    """Who is asked, how many must answer, and how long they have. ``min_clients`` are for the start alone."""

    min_clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0
    deadline_seconds: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    on_missed_quorum: Literal["pause", "fail"] = "pause"
    draw: Annotated[
        Literal["secret", "public"],
        left_out(
            "secret",
            description="who is asked follows from a secret of the coordinator, shown at the end, or from the seed",
        ),
    ] = "secret"
    sampling: Annotated[
        Literal["fixed", "poisson"],
        left_out(
            "fixed",
            description="fixed: the same number each round; poisson: each client independently with probability "
            "fraction, by a secret that is never shown (with privacy.level client)",
        ),
    ] = "fixed"

    @property
    def is_secret(self) -> bool:
        """Whether who takes part in which round is told to operators alone."""
        return self.sampling == "poisson"


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
    """How updates are aggregated. ``max_weight_share`` caps what one client can weigh (1: no cap).

    Numbers of samples are the clients' own word: rules other than the mean weigh all alike unless told otherwise.
    """

    weighting: Annotated[
        Literal["samples", "uniform"],
        Field(description="default: samples for the mean, uniform for all other rules"),
    ] = "samples"
    rule: Annotated[Rule, Field(description="rules other than the mean need methods whose phases are all means")] = (
        "mean"
    )
    tolerate: Annotated[
        float | None,
        Field(
            gt=0,
            lt=0.5,
            validate_default=True,
            description="share of the updates that may be bad: trimmed_mean cuts it off at either end, and krum and "
            f"multi_krum take f = floor(tolerate * K); default for these: {TOLERATE}",
        ),
    ] = None
    clip_norm: Annotated[
        Annotated[float, Field(gt=0)] | Literal["median"] | None,
        Field(
            description="largest L2 distance of an update from the state that its client began with; longer ones are "
            "shortened to it before the rule is applied; median: the median of the phase's updates"
        ),
    ] = None
    max_weight_share: Annotated[
        float | None,
        Field(
            gt=0, le=1, description="largest share of one client's weight; null: 2/K if five or more answer; 1: no cap"
        ),
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
    def is_plain_mean(self) -> bool:
        """Whether updates become one as their weighted mean and nothing else."""
        return self.rule == "mean" and self.clip_norm is None


class SecureAggregationSpec(Section):
    """Sums that nobody sees into: the coordinator receives the sum of the clients' changes and none of its parts.

    ``threshold``: share of a phase's clients that open the sum, above a half. ``minimum``: clients of a sum, at least.
    ``step_seconds``: for each of the four exchanges after training.
    """

    threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.6
    minimum: Annotated[int, Field(ge=3, le=1024)] = 3
    step_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0


def sample_size(fraction: float, eligible: int, secure: SecureAggregationSpec | None) -> int:
    """K = ⌈fraction·eligible⌉: at least 1, or as many as a secure sum has at least."""
    return max(1 if secure is None else secure.minimum, ceil_fraction(fraction, eligible))


class Weighting(BaseModel):
    """The rule for the weights of a secure sum: every client computes all weights itself (`whole_weights`).

    ``max_weight_share``: as ``aggregation.max_weight_share`` of the spec.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    weighting: Literal["samples", "uniform"]
    max_weight_share: Annotated[float | None, Field(gt=0, le=1)] = None

    @classmethod
    def of(cls, spec: AggregationSpec) -> Weighting:
        """The rule of a spec's aggregation."""
        return cls(weighting=spec.weighting, max_weight_share=spec.max_weight_share)

    @property
    def is_uniform(self) -> bool:
        """Whether all clients count the same."""
        return self.weighting == "uniform"

    def weight_cap(self, count: int) -> float:
        """The largest share of one of ``count`` clients."""
        return AggregationSpec(weighting=self.weighting, max_weight_share=self.max_weight_share).weight_cap(count)


def shares(samples: Mapping[Key, int], rules: AggregationSpec | Weighting) -> dict[Key, float]:
    """Each client's weight, summing to 1: by samples or equal, none over ``max_weight_share``.

    What the cap takes from some goes to the others in proportion to their weights. A cap under 1/K, which K clients
    cannot meet, means equal weights.
    """
    names = sorted(samples)
    total = sum(samples.values())
    if rules.weighting == "uniform" or total == 0:
        return {name: 1 / len(names) for name in names}  # of nobody none
    weights = {name: samples[name] / total for name in names}
    return capped(weights, rules.weight_cap(len(names)))


def capped(weights: dict[Key, float], cap: float) -> dict[Key, float]:
    """``weights``, which sum to 1, with none over ``cap``, which must be at least 1/K."""
    full: set[Key] = set()
    while True:
        free = {name: weight for name, weight in weights.items() if name not in full}
        left, mass = 1 - cap * len(full), sum(free.values())
        # Clients without samples cannot take up what the cap leaves over in proportion: they share it equally.
        scaled = {n: left * w / mass if mass > 0 else left / len(free) for n, w in free.items()}
        over = {name for name, weight in scaled.items() if weight > cap * (1 + 1e-12)}
        if not over:
            return {name: scaled.get(name, cap) for name in sorted(weights)}
        full |= over


def whole_weights(samples: Mapping[Key, int], rules: AggregationSpec | Weighting) -> dict[Key, int]:
    """Each client's weight as a whole number of 1…65,536, in the ratio of its `shares`; equal ones are all 65,536."""
    given = shares(samples, rules)
    largest = max(given.values(), default=1.0)
    return {name: max(1, round(WHOLE_WEIGHT * share / largest)) for name, share in given.items()}


class CompressionSpec(Section):
    """The encoding of changes. The state itself is not rounded."""

    up: Annotated[
        Literal["none", "bf16", "int8"],
        left_out("none", description="bf16; int8: with a scale for each 1024 entries; both are rounded at random"),
    ] = "none"


class PrivacySpec(BaseModel):
    """Differential privacy of the training.

    ``level: sample``: each client adds noise that protects its records. ``client``: the coordinator adds noise that
    protects whole clients.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    level: Annotated[
        Literal["none", "sample", "client"],
        Field(description="the noise protects one record of a client, or a whole client"),
    ] = "none"
    clip: Annotated[
        float | None, Field(gt=0, le=16, description="C, the largest L2 norm of one unit's contribution")
    ] = None
    noise_multiplier: Annotated[
        float | None, Field(ge=LEAST_NOISE, le=MOST_NOISE, description="z: the noise's standard deviation is z·C")
    ] = None
    epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="ε that the whole federation may cost each client, instead of noise_multiplier; level client: "
            "both may be given, and then rounds end before ε is exceeded",
        ),
    ] = None
    delta: Annotated[
        float | None,
        Field(
            ge=LEAST_DELTA,
            lt=1,
            description="level sample: the largest δ that a ledger may use; level client: the federation's, below "
            "1/N, by default the power of ten at or below a tenth of 1/min_clients",
        ),
    ] = None
    unit: Annotated[Literal["record", "group"], Field(description="what is protected at level sample")] = "record"
    per_group: Annotated[int, Field(ge=1, le=1024, description="records of a group that count")] = 8
    evaluation: Annotated[
        Evaluations | None,
        Field(description="which accuracies leave a site; default: withheld at levels sample and client"),
    ] = None
    evaluation_epsilon: Annotated[float, Field(gt=0, le=10, description="ε of one noisy count")] = 0.1
    accept_noise: Annotated[bool, Field(description="run even if the noise is larger than all that can be learned")] = (
        False
    )

    @property
    def protects_records(self) -> bool:
        """Whether clients add noise for their records, and report its cost."""
        return self.level == "sample"

    @property
    def protects_clients(self) -> bool:
        """Whether the coordinator adds noise for whole clients."""
        return self.level == "client"

    @property
    def evaluations(self) -> Evaluations:
        """The form in which accuracies leave a site."""
        return self.evaluation or ("plain" if self.level == "none" else "withheld")
