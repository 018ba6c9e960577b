"""Events of a federation's run: the round machine's inputs.

``now`` is in seconds of a monotonic clock, ``name`` is a client's.
"""

from __future__ import annotations

from dataclasses import dataclass

from promptfed.shared.messages import Role


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class _Timed(Event):
    now: float


@dataclass(frozen=True)
class _Explained(Event):
    reason: str


@dataclass(frozen=True)
class _OfClient(Event):
    name: str
    now: float


@dataclass(frozen=True)
class Enrolled(Event):
    """A client enrolled, or came back under its name after the operator had reset it."""

    name: str
    role: Role


class Start(_Timed):
    """The operator starts; the initial state is stored."""


class StartRefused(_Explained):
    """An automatic start was tried and refused; it is tried again when something changes."""


class Pause(Event):
    """The operator pauses."""


class Resume(_Timed):
    """The operator resumes."""


class Cancel(Event):
    """The operator cancels it."""


class Fail(_Explained):
    """The method has failed."""


class Damaged(_Explained):
    """Stored bytes that the run needs are damaged; ``reason`` says which."""


@dataclass(frozen=True)
class Withdraw(Event):
    """The operator withdraws a client; ``discard``: also drops its accepted answer to the open stage."""

    name: str
    discard: bool
    now: float


class Answered(_OfClient):
    """A client's answer to the open stage was accepted."""


class AnsweredLast(_OfClient):
    """As `Answered`; with this answer the secure sum can be opened, so that no other is needed."""


class SumInvalid(_Explained):
    """The opened secure sum cannot be one of honest clients. It is not known which client spoilt it."""


class NotComputed(_Explained):
    """The due work could not be computed on this machine; it stays due."""


class Failed(_OfClient):
    """A client said that it cannot answer."""


class Tick(_Timed):
    """Time has passed."""


class JobDone(_Timed):
    """The due work is done and its state is committed with this event."""


class Restarted(_Timed):
    """The coordinator was away: that time does not count."""
