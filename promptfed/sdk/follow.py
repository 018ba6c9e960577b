"""Following a federation over the API until it has ended or waits for an operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import get_summary
from promptfed.sdk.summary import FederationSummary
from promptfed.shared.messages import ENDED

POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment."""

    state: str
    reason: str | None
    round: int
    rounds: int
    phase: str | None
    answered: tuple[str, ...]
    awaited: tuple[str, ...]

    @classmethod
    def of(cls, federation: FederationSummary) -> Snapshot:
        """The parts of a federation that are shown while it runs."""
        return cls(
            state=federation.state,
            reason=federation.reason,
            round=federation.round,
            rounds=federation.spec.rounds,
            phase=federation.phase,
            answered=tuple(federation.answered),
            awaited=tuple(awaited.name for awaited in federation.awaited),
        )

    @property
    def over(self) -> bool:
        """Whether it has ended or waits for an operator."""
        return self.state in ENDED or (self.state == "paused" and self.reason is not None)

    def describe(self) -> str:
        """One line for people."""
        if self.state != "running":
            return f"{self.state}{f' ({self.reason})' if self.reason else ''}"
        waiting = f", waiting for {', '.join(self.awaited[:4])}" if self.awaited else ""
        return f"{self.phase or 'between phases'}: {len(self.answered)} answered{waiting}"


def follow(
    api: Coordinator, federation: str, between: Callable[[], object] = lambda: None, poll: float = POLL_SECONDS
) -> Iterator[Snapshot]:
    """Yield a snapshot at every change until `Snapshot.over`; ``between`` is called between two requests."""
    last = None
    while True:
        snapshot = Snapshot.of(api.send(get_summary(federation)).view)
        if snapshot != last:
            yield snapshot
            last = snapshot
        if snapshot.over:
            return
        between()
        time.sleep(poll)
