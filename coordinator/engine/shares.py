"""Which of several coordinators is to carry out which federation: about as many each, of the running ones too.

Each coordinator computes this from its own look at the leases. Two that have looked at different moments may come to
different results; a lease has one holder all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.store.leases import LeaseView

SLACK = 0.1  # of a fair share: smaller differences are left as they are


def deal(leases: Sequence[LeaseView], takers: Collection[str]) -> dict[str, list[str]]:
    """Deal the free federations out; returns ids by coordinator, running ones first.

    Each goes to the coordinator with the fewest of its kind (running or not), then with the fewest at all.
    """
    dealt: dict[str, list[str]] = {taker: [] for taker in takers}
    if not dealt:
        return dealt
    total = Counter(lease.holder for lease in leases)
    for running in (True, False):
        kind = [lease for lease in leases if lease.running == running]
        of_kind = Counter(lease.holder for lease in kind)
        for lease in kind:
            if lease.holder is None:
                taker = min(dealt, key=lambda taker: (of_kind[taker], total[taker], taker))
                dealt[taker].append(lease.federation)
                of_kind[taker] += 1
                total[taker] += 1
    return dealt


def surplus(
    leases: Sequence[LeaseView], takers: Collection[str], mine: str, may_move: Callable[[str], bool]
) -> list[str]:
    """Federations that the coordinator ``mine`` holds beyond its share, and that may move now."""
    over: list[str] = []
    for running in (True, False):
        kind = [lease for lease in leases if lease.running == running and lease.holder is not None]
        own = [lease.federation for lease in kind if lease.holder == mine]
        share = -(-len(kind) // len(takers))
        if len(own) > share + max(1.0, SLACK * share):
            over += [federation for federation in own if may_move(federation)][: len(own) - share]
    return over


def may_move(federation: Federation | None) -> bool:
    """Whether a federation (None: it is not in memory) can move now, and nobody has to do anything again.

    That is while it is not running, or while a phase is open to which nobody has answered.
    """
    if federation is None:
        return True
    run = federation.run
    if run.state != "running":
        return not federation.starting
    if run.stage is None or run.stage.closed or run.due_job is not None:
        return False
    filled = all(task.payload_sha256 is not None for task in federation.tasks.values())
    return filled and set(run.stage.asks.values()) == {"open"}
