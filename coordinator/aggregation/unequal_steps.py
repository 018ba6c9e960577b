"""Updates of clients that took different numbers of steps: their changes are weighed by FedNova."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_low

from promptfed.coordinator.aggregation.global_state import Counted
from promptfed.shared.spec.budget import accumulated

MOST_TIMES = 10.0
"""As how many times the median's sum of steps a client's counts in their mean at most: it says the number itself."""


def factors(updates: Iterable[Counted], steps: Mapping[str, int], momentum: float) -> dict[str, float]:
    """The factor of each client's change; empty where all took the same number of steps.

    x + τ_eff·Σ p_i·Δ_i/‖a_i‖₁ with τ_eff = Σ p_i·‖a_i‖₁ (Wang et al. 2020, equation 10), so that the factor of Δ_i is
    τ_eff/‖a_i‖₁. p_i are the weights of ``updates``. In τ_eff, which only sets the length of the step, no ‖a_i‖₁ counts
    as more than `MOST_TIMES` their median: else one client that says 2³¹ steps would enlarge the changes of all.
    """
    shares = {client: weight for client, weight, _ in updates if client in steps}
    if len({steps[client] for client in shares}) < 2:
        return {}
    sums = {client: accumulated(steps[client], momentum) for client in shares}
    most = MOST_TIMES * median_low(sums.values())
    effective = sum(shares[client] * min(sums[client], most) for client in sorted(shares)) / sum(shares.values())
    return {client: effective / taken for client, taken in sums.items()}
