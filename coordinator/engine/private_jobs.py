"""Means with central noise, from what is stored: computed once when a phase is over, and again for a replay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation import global_state, secure_sums
from promptfed.coordinator.aggregation.private_mean import NoiseTerms, PrivateMean, private_mean
from promptfed.coordinator.aggregation.rules import Judged
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.tables import PhaseRow, StateRow
from promptfed.shared.methods.core.checks.client_checks import costs
from promptfed.shared.methods.core.interface.base import ClientUpdate, Phase, ServerContext
from promptfed.shared.tensors import Arrays


def terms_of(federation: Federation, row: PhaseRow) -> NoiseTerms:
    """What the closed phase of ``row`` is noised with: its key and K̄."""
    privacy = federation.spec.privacy
    assert row.noise_key is not None, "a phase at client level closes with its key"
    assert row.expected is not None, "a phase opens with how many are expected"
    assert privacy.clip is not None
    assert privacy.noise_multiplier is not None
    return NoiseTerms(privacy.clip, privacy.noise_multiplier, row.expected, bytes.fromhex(row.noise_key))


def released(session: Session, federation: Federation) -> int:
    """How many noised sums there have been so far."""
    mine = (StateRow.federation_id == federation.id, StateRow.phase_id.is_not(None))
    return session.scalar(select(func.count()).where(*mine)) or 0


@dataclass(frozen=True)
class Noised:
    """A state with its noise, and what the round's report keeps."""

    after: Arrays
    mean: PrivateMean
    terms: NoiseTerms

    def judged(self) -> dict[str, Judged]:
        """What became of each client's change."""
        clip, share = self.terms.clip, 1 / self.terms.divisor
        return {
            client: Judged("clipped" if length > clip else "counted", share, None)
            for client, length in self.mean.lengths.items()
        }

    def measured(self, federation: Federation, phases: int, noise: str) -> dict[str, Any]:
        """Of the phase: what it was noised with, and what all ``phases`` so far have cost."""
        return {
            **costs(federation.spec, phases),
            "delta": federation.spec.privacy.delta,
            "clip": self.terms.clip,
            "noise_multiplier": self.terms.noise_multiplier,
            "expected": self.terms.expected,
            "noise": "seeded" if noise == "seeded" else "central",
        }


def noised(
    federation: Federation,
    state: Arrays,
    phase: Phase,
    updates: Iterable[ClientUpdate],
    terms: NoiseTerms,
    context: ServerContext,
) -> Noised:
    """The state after ``phase`` of these updates, whose mean is clipped and noised by ``terms``."""
    payload = global_state.common_payload(federation, state, phase, context)
    mean = private_mean(updates, payload, secure_sums.shapes(federation, phase), terms)
    return Noised(global_state.after_mean(federation, state, phase, mean.tensors, context), mean, terms)
