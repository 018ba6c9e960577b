"""What clients weigh in a mean or a secure sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.spec.sections import AggregationSpec, Key

WHOLE_WEIGHT = 1 << 16
"""The weight of the heaviest client; every client's is a whole number of 65,536ths of it, at least 1."""


class Weighting(BaseModel):
    """The rule for the weights of a secure sum: every client computes all weights itself (`whole_weights`).

    ``max_weight_share``: as ``aggregation.max_weight_share`` of the spec.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    weighting: Literal["samples", "uniform"]
    max_weight_share: float | None = Field(default=None, gt=0, le=1)

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
    parts = shares(samples, rules)
    largest = max(parts.values(), default=1.0)
    return {name: max(1, round(WHOLE_WEIGHT * share / largest)) for name, share in parts.items()}
