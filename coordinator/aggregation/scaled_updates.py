"""Updates whose changes count with a factor: of earlier states (FedBuff), or of other numbers of steps (FedNova)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from promptfed.coordinator.aggregation.changes import change_norm
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.problems import TooStale
from promptfed.coordinator.store.blobs import Blobs
from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.methods.core.sizes import change_limit
from promptfed.shared.tensors import Array

NONE = np.zeros(())
TINY = 1e-300  # no division by the length of a change that is none


@dataclass(frozen=True)
class Late:
    """An update from another state: the digest of the payload that it started from, and its staleness in rounds."""

    payload_sha256: str
    staleness: int


@dataclass(frozen=True)
class Scaled:
    """What a phase's changes are multiplied by, by client: those of ``late`` updates, and of unequal steps."""

    late: Mapping[str, Late] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.late or self.factors)


def expect_fresh(federation: Federation, round: int) -> None:
    """Raise TooStale for an expired task that began in ``round``, unless the last round is over."""
    now, schedule = federation.run.round, federation.spec.schedule
    if schedule is not None and now < federation.rules.last_round:
        text = f"the state of this task is {now - round} rounds old; an update may be {schedule.max_staleness} late"
        raise TooStale(f"{text}: train on the next task", round=now)


def moved_on(
    blobs: Blobs,
    federation: Federation,
    updates: Iterable[ClientUpdate],
    payload: Mapping[str, Array],
    scaled: Scaled,
) -> Iterator[ClientUpdate]:
    """The updates as if they had started from ``payload``, the current one, and their changes were scaled.

    One that started from w₀ becomes w + f·(update - w₀), so that a weighted mean of all is w + Σ p·f·Δ. A tensor that
    is not in the payload is itself a change. An update of the current payload with the factor 1 stays as it is.

    A client says itself how few steps it took. So a change that is enlarged stays within the limit of admission.
    """
    schedule = federation.spec.schedule
    began_at = lru_cache(maxsize=8)(lambda sha256: blobs.tensors(sha256)[0])
    for update in updates:
        known, factor = scaled.late.get(update.client), scaled.factors.get(update.client, 1.0)
        if known is None and factor == 1:
            yield update
            continue
        began = payload if known is None else began_at(known.payload_sha256)
        if factor > 1:
            numbers = sum(tensor.size for tensor in update.tensors.values())
            length = max(change_norm(update.tensors, began), TINY)
            factor = max(1.0, min(factor, change_limit(federation.spec, federation.method, numbers) / length))
        if known is not None and schedule is not None:
            factor *= schedule.factor(known.staleness)
        moved = {
            name: _moved(tensor, began.get(name, NONE), payload.get(name, NONE), factor)
            for name, tensor in update.tensors.items()
        }
        yield ClientUpdate(update.client, update.weight, moved)


def _moved(tensor: Array, began: Array, now: Array, factor: float) -> Array:
    change = np.subtract(tensor, began, dtype=np.float64)
    change *= factor
    change += now
    moved: Array = change.astype(tensor.dtype)
    return moved
