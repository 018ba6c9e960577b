"""A federation's run as plain values: its rules, its state, the events that change it, and the facts that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from promptfed.shared.messages import FederationState, Role, TaskKind
from promptfed.shared.secagg import MOST_CLIENTS
from promptfed.shared.spec.sections import FINAL, SecureAggregationSpec, sample_size

AskStatus = Literal["open", "answered", "failed", "withdrawn", "discarded", "expired", "cancelled"]
DueJob = Literal["join", "aggregate", "judge"]
QUORUM_MISSED = "quorum_missed"
BUDGET_SPENT = "privacy_budget"
DAMAGED = "damaged: "
"""Prefix of the reason of a federation that waits until damaged bytes are put back."""
EVALUATION = "evaluation"


@dataclass(frozen=True)
class SecureStep:
    """One of the five steps of a secure sum: ``index`` 0 to 4 of an ``attempt`` (from 1) at the method's ``phase``.

    In numbers of steps of the round: ``first`` of this attempt; ``following``, where the next one begins, if there is
    one; ``after``, where the round goes on when the sum is there. ``number`` counts the method's phases from 0.
    """

    index: int
    attempt: int
    number: int
    phase: str
    first: int
    following: int | None
    after: int


@dataclass(frozen=True)
class PhasePlan:
    """A phase of the method, or one step of its secure sum. ``ask``: its clients, if it is not the round's first.

    ``seconds``: its own deadline, where it has one.
    """

    name: str
    ask: Literal["answered", "all"] = "answered"
    kind: TaskKind = "train"
    seconds: float | None = None
    secure: SecureStep | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether an earlier step of its secure sum determines its clients."""
        return self.secure is not None and (self.secure.index > 0 or self.secure.attempt > 1)


@dataclass(frozen=True)
class Rules:
    """What a spec says about rounds; ``phases(round)`` is the method's plan.

    ``draw``: what the order follows from in which clients are asked: a secret, or the spec's seed. ``poisson_key``:
    the secret of Poisson sampling, in hex, where that is how clients are sampled. ``fixed_divisor``: K stays what it
    was when a phase opened. ``budget_rounds``: rounds that a privacy budget allows, where it ends before the rounds do.
    ``selects``: after the last round the best one's state is tested. ``least_answers``: that the aggregation's rule
    can take, however many were withdrawn. ``patience``: evaluations without a rise, after which the rounds end.
    """

    draw: int | str
    rounds: int
    min_clients: int
    fraction: float
    quorum: float
    deadline_seconds: float
    on_missed_quorum: Literal["pause", "fail"]
    evaluate_every: int
    phases: Callable[[int], tuple[PhasePlan, ...]]
    join_when_extended: bool = True
    secure: SecureAggregationSpec | None = None
    poisson_key: str | None = None
    fixed_divisor: bool = False
    budget_rounds: int | None = None
    selects: bool = False
    least_answers: int = 1
    patience: int | None = None

    @property
    def last_round(self) -> int:
        """The round after which a federation is finished."""
        return self.rounds if self.budget_rounds is None else min(self.rounds, self.budget_rounds)

    def evaluates(self, round: int) -> bool:
        """Whether the state after ``round`` is evaluated."""
        return round % self.evaluate_every == 0 or round == self.last_round

    def evaluation(self, round: int, step: int) -> str | None:
        """The name of the evaluation at ``step`` after the round's phases, from 0; None if there is none."""
        if step == 1:
            return FINAL if self.selects and round == self.last_round else None
        return EVALUATION if step == 0 and self.evaluates(round) else None

    def sample_size(self, eligible: int) -> int:
        """K, of the fraction of those ``eligible``; ``min_clients`` gates the start alone."""
        size = sample_size(self.fraction, eligible, self.secure)
        return size if self.secure is None else min(size, MOST_CLIENTS)

    def seconds(self, plan: PhasePlan | None) -> float:
        """The time limit of a stage: its own, or the spec's."""
        return self.deadline_seconds if plan is None or plan.seconds is None else plan.seconds

    def plan(self, round: int, step: int) -> PhasePlan | None:
        """The stage at ``step`` of ``round``; None for its evaluation."""
        plans = self.phases(round) if round > 0 else ()
        return plans[step] if step < len(plans) else None


@dataclass(frozen=True)
class Member:
    """An enrolled client. ``joined``: the state includes it; newcomers join when a round opens."""

    role: Role
    active: bool = True
    joined: bool = False


@dataclass(frozen=True)
class Stage:
    """An open or closed exchange: a phase of a round, or its evaluation. ``sample_size`` is the round's K."""

    kind: TaskKind
    name: str
    asks: Mapping[str, AskStatus]
    sample_size: int
    deadline: float
    extended: bool = False
    closed: bool = False

    def having(self, *statuses: AskStatus) -> list[str]:
        """Names of the asked clients with one of ``statuses``, sorted."""
        return sorted(name for name, status in self.asks.items() if status in statuses)


@dataclass(frozen=True)
class Run:
    """The state of a run. ``step`` counts a round's phases from 0; the last step is its evaluation.

    Of a secure sum: ``cohort`` sent keys for the latest attempt, ``previous`` answered its last step.
    """

    state: FederationState = "enrolling"
    reason: str | None = None
    round: int = 0
    step: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    stage: Stage | None = None
    due_job: DueJob | None = None
    joining: tuple[str, ...] = ()
    answered_first: tuple[str, ...] = ()
    sample_size: int = 0
    cohort: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """Whether it waits for damaged bytes to be put back."""
        return self.reason is not None and self.reason.startswith(DAMAGED)

    def trainers(self) -> list[str]:
        """Active trainers, newcomers included, in order of name."""
        return sorted(name for name, one in self.members.items() if one.active and one.role == "trainer")

    def starters(self, rules: Rules) -> list[str]:
        """The clients that a start waits for: trainers, or all active ones where there are no rounds of training."""
        there = self.newcomers()
        return [name for name in self.trainers() if name in there] if rules.rounds else list(there)

    def eligible(self) -> list[str]:
        """Active trainers that the state includes, in order of name."""
        return [name for name in self.trainers() if self.members[name].joined]

    def newcomers(self) -> tuple[str, ...]:
        """Active clients of any role that the state does not include yet, in order of name."""
        return tuple(sorted(name for name, one in self.members.items() if one.active and not one.joined))


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
    """A client has answered, and with that the secure sum can be opened: no other answer is needed."""


class SumInvalid(_Explained):
    """The opened secure sum cannot be one of honest clients. It is not known which client spoilt it."""


class NotComputed(_Explained):
    """The due work could not be computed on this machine; it stays due."""


class Failed(_OfClient):
    """A client said that it cannot answer."""


@dataclass(frozen=True)
class LeftOut(Event):
    """A secure sum can only be made without ``names``: others' policies rule them out, or their shares are false."""

    names: tuple[str, ...]
    now: float


class Tick(_Timed):
    """Time has passed."""


class JobDone(_Timed):
    """The due work is done and its state is committed with this event."""


class NoRise(_Timed):
    """The due work was to judge the figures, and they rise no more: the best round's state is tested, and it ends."""


class Restarted(_Timed):
    """The coordinator was away: that time does not count."""


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
