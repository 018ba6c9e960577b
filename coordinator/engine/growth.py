"""Detection of a state that grows without bound, before it is committed, and of the client with the longest change.

Each change is limited on arrival (``admission.max_update_norm``). A method may still compute a much larger state from
them, and honest clients that train on it then send ever larger updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.changes import LEAST
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.tables import PhaseRow
from promptfed.shared.tensors import Arrays, method_part, sum_of_squares

LARGE = 100.0  # root mean square of a tensor; of states of honest runs it is below 10


class StateGrows(Exception):
    """A phase's state must not be committed before an operator has accepted it.

    ``changes``: by client, the norm of each change that was counted in the phase. ``finite``: whether its numbers are,
    so that an operator may accept it.
    """

    def __init__(self, what: str, changes: Mapping[str, float], *, finite: bool = True):
        super().__init__(what)
        self.changes = changes
        self.finite = finite


def check(before: Arrays, after: Arrays, changes: Mapping[str, float], *, accepted: bool) -> None:
    """Raise StateGrows if the root mean square of a tensor has passed `LARGE`, ten times `LARGE`, and so on.

    Each power of ten is reported once, so a state that the operator has ``accepted`` does not stop the next phase.
    """
    name, size = _largest(after)
    if accepted or _powers(size) <= _powers(_largest(before)[1]):
        return
    raise StateGrows(f"the numbers of tensor {name!r} have a root mean square of {size:.3g}", changes)


def reason(session: Session, federation: Federation, error: StateGrows) -> str:
    """Why the federation pauses, and what the operator can do. Names the client whose change was the longest."""
    text = f"the state after round {federation.run.round} ({federation.phase}) grows without bound: {error}."
    accept = " Or resume to accept this state." if error.finite else ""
    longest = _longest([error.changes, *_earlier(session, federation)])
    if longest is None:
        return f"{text} Cancel the federation.{accept}"
    client, size, times = longest
    how = f"norm {size:.4g}" + (f", {times:.4g} times the phase's median" if times is not None else "")
    text = f"{text} The longest change is that of {client!r} ({how})."
    if client in error.changes:
        return f"{text} Withdraw {client!r} with discard=true and resume: the phase is aggregated without it.{accept}"
    return f"{text} It is part of the state since an earlier phase, and withdrawing {client!r} does not undo it: " + (
        f"cancel, and start a federation without {client!r}.{accept}"
    )


def _largest(state: Arrays) -> tuple[str, float]:
    """The tensor with the largest root mean square, and that number."""
    sizes = {"": 0.0}
    for name, tensor in method_part(state).items():
        if tensor.dtype.kind == "f" and tensor.size:
            sizes[name] = math.sqrt(sum_of_squares(tensor) / tensor.size)
    name = max(sizes, key=lambda key: sizes[key])
    return name, sizes[name]


def _powers(size: float) -> int:
    """How many of `LARGE`, 10·`LARGE`, 100·`LARGE`, ... are at most ``size``."""
    return 0 if size < LARGE else 1 + math.floor(math.log10(size / LARGE))


def _earlier(session: Session, federation: Federation) -> list[Mapping[str, float]]:
    """The changes of all completed phases: what grows now may have come in rounds ago."""
    mine = (PhaseRow.federation_id == federation.id, PhaseRow.completed_at.is_not(None))
    measured = session.scalars(select(PhaseRow.measured).where(*mine))
    return [kept.get("changes", {}) for kept in measured if kept]


def _longest(phases: list[Mapping[str, float]]) -> tuple[str, float, float | None] | None:
    """The client whose change stands out most, its norm, and how many times the median of its phase that is.

    Of two clients nobody can say which stands out: there it is the longer change, without a median.
    """
    compared: list[tuple[float, str, float]] = []
    for changes in phases:
        middle = median(changes.values()) if len(changes) >= LEAST else 0.0
        if middle > 0:
            compared += [(size / middle, client, size) for client, size in changes.items()]
    if compared:
        times, client, size = max(compared)
        return client, size, times
    sizes = [(size, client) for changes in phases for client, size in changes.items()]
    if not sizes:
        return None
    size, client = max(sizes)
    return client, size, None
