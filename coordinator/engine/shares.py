"""Which of several coordinators is to carry out which federation: about as many each, of the running ones too.

Each coordinator computes this from its own look at the leases. Two that have looked at different moments may come to
different results; a lease has one holder all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

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
