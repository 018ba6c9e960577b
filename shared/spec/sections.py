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
from promptfed.shared.spec.section import Section, ceil_fraction, left_out, option

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


Evaluations = Literal["withheld", "noisy", "plain"]
Metric = Literal["accuracy", "macro_f1"]


class SelectionSpec(Section):
    """Which round is exported. The clients' mean counts; of equal rounds the first is chosen."""

    metric: Metric = option("accuracy", "what chooses the best round; of held-out images")
    split: Literal["validation"] = option("validation", "images that choose the best round")
    share: float = option(0.2, "share of a trainer's training images that is held out for the choice", gt=0, lt=1)


class StopSpec(Section):
    """When a federation ends before its rounds do, by the clients' mean on the images that ``selection`` holds out."""

    patience: Annotated[
        int, Field(ge=1, le=100_000, description="evaluations in a row without a rise, after which it ends")
    ]
    metric: Metric = option("accuracy", "what has to rise; of held-out images")


def best(means: Mapping[int, float]) -> int | None:
    """The first of the rounds with the highest mean; None of none."""
    return min(means, key=lambda round: (-means[round], round), default=None)


def without_rise(means: Mapping[int, float]) -> int:
    """How many evaluations came after the `best` one."""
    highest = best(means)
    return sum(highest is not None and round > highest for round in means)


class ParticipationSpec(Section):
    """Who is asked, how many must answer, and how long they have. ``min_clients`` are for the start alone."""

    min_clients: int = option(1, "sites that must have joined; to train, before the start", ge=1, le=100_000)
    fraction: float = option(
        1.0, "share of sites asked in a round; rounded up, at least 1, or a sum's minimum", gt=0, le=1
    )
    quorum: float = option(1.0, "share of those asked that must answer", gt=0, le=1)
    deadline_seconds: float = option(600.0, "seconds for an answer; in each phase", gt=0, le=30 * 86400)
    on_missed_quorum: Literal["pause", "fail"] = option("pause", "if too few answer; after one extension")
    draw: Literal["secret", "public"] = left_out(
        "secret", "where the draw of sites comes from: a secret, shown at the end, or the seed"
    )
    sampling: Literal["fixed", "poisson"] = left_out(
        "fixed",
        "how sites are drawn; fixed: the same number each round; poisson: each with probability fraction, by a secret "
        "that is never shown (with privacy.level client)",
    )

    @property
    def is_secret(self) -> bool:
        """Whether who takes part in which round is told to operators alone."""
        return self.sampling == "poisson"


class ServerOptimizerSpec(Section):
    """A step of the coordinator's own on the mean's change: FedAvgM, FedAdagrad, FedAdam or FedYogi.

    x ← x + η·v with v ← β·v + Δ (momentum), or x ← x + η·m/(√v + τ) with m ← β₁·m + (1 − β₁)·Δ (the others).
    """

    optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = option(
        "none", "optimizer of the coordinator: a step on the aggregated change (FedAvgM, FedAdagrad ...)"
    )
    learning_rate: float | None = option(
        None, "learning rate η of the coordinator; default: 1 for momentum, 0.01 for the others", gt=0, le=1000
    )
    momentum: float | None = option(None, "momentum β of the coordinator; default: 0.9", ge=0, lt=1)
    beta1: float | None = option(None, "first moment's decay β₁; default: 0 for adagrad, else 0.9", ge=0, lt=1)
    beta2: float | None = option(None, "second moment's decay β₂ of adam and yogi; default: 0.99", ge=0, lt=1)
    tau: float | None = option(None, "least second moment τ; outside the root; default: 0.001", gt=0, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _what_an_optimizer_takes(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("optimizer", "none")
        if not isinstance(kind, str) or kind not in SERVER_DEFAULTS:
            return given
        chosen = {key: value for key, value in given.items() if value is not None}
        others = [key for key in chosen if key in cls.model_fields and key not in (*SERVER_DEFAULTS[kind], "optimizer")]
        if others:
            takes = ", ".join(SERVER_DEFAULTS[kind]) or "none"
            raise ValueError(f"optimizer {kind} has no {others[0]}: leave it out (it takes: {takes})")
        return {**SERVER_DEFAULTS[kind], **chosen}


class AggregationSpec(Section):
    """How updates are aggregated. ``max_weight_share`` caps what one client can weigh (1: no cap).

    Numbers of samples are the clients' own word: rules other than the mean weigh all alike unless told otherwise.
    """

    weighting: Literal["samples", "uniform"] = option(
        "samples", "what weighs a site; default: samples for the mean, uniform for all other rules"
    )
    rule: Rule = option("mean", "how updates become one; all but the mean need methods whose phases are means")
    tolerate: float | None = option(
        None,
        "share of the updates that may be bad: trimmed_mean cuts it off at either end, krum and multi_krum take "
        f"f = floor(tolerate * K); default for these: {TOLERATE}",
        gt=0,
        lt=0.5,
        validate_default=True,
    )
    clip_norm: Annotated[float, Field(gt=0)] | Literal["median"] | None = option(
        None,
        "longest change of a site; an L2 norm; longer ones are shortened to it before the rule; median: of the "
        "phase's updates",
    )
    max_weight_share: float | None = option(
        None, "largest share of one client's weight; null: 2/K if five or more answer; 1: no cap", gt=0, le=1
    )
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

    threshold: float = option(0.6, "share of sites that open a secure sum; above a half", gt=0.5, le=1)
    minimum: int = option(3, "fewest sites of a secure sum", ge=3, le=1024)
    step_seconds: float = option(120.0, "seconds for a step of a secure sum; of four after training", gt=0, le=86400)


def sample_size(fraction: float, eligible: int, secure: SecureAggregationSpec | None) -> int:
    """K = ⌈fraction·eligible⌉: at least 1, or as many as a secure sum has at least."""
    return max(1 if secure is None else secure.minimum, ceil_fraction(fraction, eligible))


class CompressionSpec(Section):
    """The encoding of changes. The state itself is not rounded."""

    up: Literal["none", "bf16", "int8"] = left_out(
        "none", "encoding of changes; int8: with a scale for each 1024 entries; rounded at random"
    )


class PrivacySpec(BaseModel):
    """Differential privacy of the training.

    ``level: sample``: each client adds noise that protects its records. ``client``: the coordinator adds noise that
    protects whole clients.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    level: Literal["none", "sample", "client"] = option(
        "none", "what noise protects: one record of a client, or a whole client"
    )
    clip: float | None = option(None, "longest contribution C of one unit; an L2 norm", gt=0, le=16)
    noise_multiplier: float | None = option(
        None, "noise z, in contributions: its standard deviation is z·C", ge=LEAST_NOISE, le=MOST_NOISE
    )
    epsilon: float | None = option(
        None,
        "privacy budget ε: what it may cost each client, instead of noise_multiplier; level client: "
        "both may be given, and then rounds end before ε is exceeded",
        gt=0,
        le=100,
    )
    delta: float | None = option(
        None,
        "privacy budget's δ; level sample: the largest that a ledger may use; level client: below 1/N, by default "
        "the power of ten at or below 1/(10 min_clients)",
        ge=LEAST_DELTA,
        lt=1,
    )
    unit: Literal["record", "group"] = option("record", "unit that is protected at level sample")
    per_group: int = option(8, "records of a group that count", ge=1, le=1024)
    evaluation: Evaluations | None = option(
        None, "accuracies that leave a site; default: withheld at levels sample and client"
    )
    evaluation_epsilon: float = option(0.1, "ε of one noisy count", gt=0, le=10)
    accept_noise: bool = option(False, "run even if the noise is larger than all that can be learned")

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
