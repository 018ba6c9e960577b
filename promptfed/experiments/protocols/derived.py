"""A protocol made from another: FedMGP's combined metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean

from promptfed.experiments.protocols.protocols import (
    PROTOCOLS,
    BaseToNovel,
    Pick,
    Protocol,
)
from promptfed.experiments.protocols.setting import Setting
from promptfed.sdk.result import Accuracy

CM = "CM"


class CombinedMetric(BaseToNovel):
    """Base-to-novel with a further column, CM = (local + HM(base, novel))/2 (Bo et al., NeurIPS 2025, Table 1).

    It is computed from the three averages in the table, as is the harmonic mean.
    """

    name = "combined:base-to-novel"
    summary = "base classes divided over the clients, novel classes unseen; CM = (local + HM(base, novel))/2"

    def columns(self, setting: Setting) -> tuple[str, ...]:
        """Those of base-to-novel, and CM."""
        return (*super().columns(setting), CM)

    def scores(self, by_trial: Mapping[str, Sequence[Accuracy]], pick: Pick) -> dict[str, float]:
        """Those of base-to-novel, and CM."""
        means = super().scores(by_trial, pick)
        others = harmonic_mean([means["base"], means["novel"]])
        return means | {CM: (means["local"] + others) / 2}


KNOWN: dict[str, Protocol] = PROTOCOLS | {CombinedMetric.name: CombinedMetric()}
"""Every protocol by its name on the command line."""
