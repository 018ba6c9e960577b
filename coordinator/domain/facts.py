"""Consequences of an event that are stored: the round machine's outputs."""

from __future__ import annotations

from dataclasses import dataclass

from promptfed.coordinator.domain.run_state import AskStatus
from promptfed.shared.messages import FederationState, TaskKind


@dataclass(frozen=True)
class Fact:
    """Base of all facts."""


@dataclass(frozen=True)
class _OfClients(Fact):
    names: tuple[str, ...]


@dataclass(frozen=True)
class Moved(Fact):
    """The federation's state changed."""

    state: FederationState
    reason: str | None


@dataclass(frozen=True)
class Opened(Fact):
    """A stage opened and asks ``names``. ``expected``: K̄, the expected number of counted answers."""

    round: int
    step: int
    kind: TaskKind
    name: str
    names: tuple[str, ...]
    sample_size: int
    expected: float


@dataclass(frozen=True)
class Extended(Fact):
    """The open stage missed its quorum and is extended once (or a resume has reset that)."""

    extended: bool


@dataclass(frozen=True)
class DeadlineSet(Fact):
    """The open stage has ``seconds`` left from now."""

    seconds: float


@dataclass(frozen=True)
class Settled(Fact):
    """A client's task in the open stage is settled."""

    name: str
    status: AskStatus


@dataclass(frozen=True)
class Closed(Fact):
    """The open stage closed. ``counted``: the clients whose answers count, in order of name."""

    counted: tuple[str, ...]
    sample_size: int


@dataclass(frozen=True)
class AttemptFailed(Fact):
    """Too few clients answered a step of a secure sum: the attempt has failed, and the next one begins."""

    attempt: int


class Completed(Fact):
    """The closed stage is complete: its state is committed, or it was an evaluation."""


class Asked(_OfClients):
    """The open stage asks ``names`` in addition."""


class Joined(_OfClients):
    """The state includes these clients now."""
