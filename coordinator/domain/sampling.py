"""The clients that a round asks, and how many must answer.

Fixed: K of the eligible, in an order that follows from the draw. Poisson: each eligible client by itself with
probability q, which is what the accountant of privacy at client level assumes; so nobody is added later, an empty
sample is one like any other, and how many are expected, K̄ = q·N, is fixed when the phase opens.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from promptfed.coordinator.domain.run_state import Rules, Run, Stage
from promptfed.shared.seeds import sampling_order
from promptfed.shared.spec.spec_section import ceil_fraction


def poisson_sample(key: str, round: int, names: Iterable[str], q: float) -> list[str]:
    """Those of ``names`` for whom the first 8 bytes of HMAC-SHA256(key, "round|name") are below q·2⁶⁴."""
    secret = bytes.fromhex(key)

    def word(name: str) -> int:
        return int.from_bytes(hmac.digest(secret, f"{round}|{name}".encode(), "sha256")[:8], "big")

    return [name for name in names if word(name) < q * 2.0**64]


def first_asked(rules: Rules, run: Run, eligible: Sequence[str]) -> tuple[Sequence[str], int, float]:
    """The clients that a round's first phase asks, its K, and the expected number of counted answers (K̄)."""
    poisson = rules.poisson_key
    if poisson is not None:
        names = poisson_sample(poisson, run.round, eligible, rules.fraction)
        return names, len(names), rules.fraction * len(eligible)
    size = rules.sample_size(len(eligible))
    return sampling_order(rules.draw, run.round, list(eligible))[:size], size, float(size)


def present(rules: Rules, run: Run, stage: Stage) -> int:
    """K minus the clients that were withdrawn and not replaced."""
    least = rules.min_clients if run.step == 0 else 1
    if rules.poisson_key is not None:
        least = 0  # min_clients gates the start alone
    spare = max(0, len(stage.asks) - stage.sample_size)
    gone = len(stage.having("withdrawn", "discarded"))
    return max(least, stage.sample_size - max(0, gone - spare))


def needed(rules: Rules, run: Run, stage: Stage) -> int:
    """The number of answers that close the stage; 0 if Poisson sampling asks no client, or all were withdrawn."""
    there = present(rules, run, stage)
    return 0 if there == 0 else max(1, ceil_fraction(rules.quorum, there))


def size_when_closed(rules: Rules, run: Run, stage: Stage) -> int:
    """The recorded K of a closed stage. With a fixed divisor (level ``client``) it does not change."""
    return stage.sample_size if rules.fixed_divisor else present(rules, run, stage)
