"""Updates of asynchronous rounds: changes relative to earlier states, weakened by their staleness (FedBuff)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.problems import TooStale
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.tables import PhaseRow, TaskRow
from promptfed.shared.methods.core.interface.base import ClientUpdate
from promptfed.shared.spec.schedule import ScheduleSpec
from promptfed.shared.tensors import Array

NONE = np.zeros(())


@dataclass(frozen=True)
class Late:
    """An update from an earlier state: the digest of the payload that it started from, and its staleness in rounds."""

    payload_sha256: str
    staleness: int


def expect_fresh(federation: Federation, round: int) -> None:
    """Raise TooStale for an expired task that began in ``round``, unless the last round is over."""
    now, schedule = federation.run.round, federation.spec.schedule
    if schedule is not None and now < federation.rules.last_round:
        text = f"the state of this task is {now - round} rounds old; an update may be {schedule.max_staleness} late"
        raise TooStale(f"{text}: train on the next task", round=now)


def late_updates(session: Session, phase_id: int) -> dict[str, Late]:
    """The counted updates of a phase that began in earlier rounds, by client."""
    query = select(TaskRow.client, TaskRow.payload_sha256, PhaseRow.round - TaskRow.began)
    query = query.join(PhaseRow, PhaseRow.id == TaskRow.phase_id)
    rows = session.execute(query.where(TaskRow.phase_id == phase_id, TaskRow.counted, TaskRow.began.is_not(None)))
    return {client: Late(str(sha256), staleness) for client, sha256, staleness in rows}


def moved_on(
    blobs: Blobs,
    updates: Iterable[ClientUpdate],
    payload: Mapping[str, Array],
    late: Mapping[str, Late],
    schedule: ScheduleSpec,
) -> Iterator[ClientUpdate]:
    """The updates as if they had started from ``payload``, the current one.

    One that started from w₀ becomes w + s(τ)·(update - w₀), so that a weighted mean of all is w + Σ p·s(τ)·Δ. A tensor
    that is not in the payload is itself a change. An update that started from the current payload stays as it is.
    """
    for update in updates:
        known = late.get(update.client)
        if known is None:
            yield update
            continue
        began, _ = blobs.tensors(known.payload_sha256)
        factor = schedule.factor(known.staleness)
        moved = {
            name: _moved(tensor, began.get(name, NONE), payload.get(name, NONE), factor)
            for name, tensor in update.tensors.items()
        }
        yield ClientUpdate(update.client, update.weight, moved)


def _moved(tensor: Array, began: Array, now: Array, factor: float) -> Array:
    change = tensor.astype(np.float64) - began.astype(np.float64)
    moved: Array = (now.astype(np.float64) + factor * change).astype(tensor.dtype)
    return moved
