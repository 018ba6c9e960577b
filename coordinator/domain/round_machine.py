"""The round machine of one federation, a pure function: an event gives the next run, and facts.

It says which clients a round asks, how many must answer, and the steps of a securely summed phase: train, share, mask,
confirm, unmask; in attempts.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import replace

from promptfed.coordinator.domain import run_state
from promptfed.coordinator.domain.run_state import (
    BUDGET_SPENT,
    DAMAGED,
    QUORUM_MISSED,
    AskStatus,
    Member,
    PhasePlan,
    Rules,
    Run,
    SecureStep,
    Stage,
)
from promptfed.shared.messages import ENDED, FederationState, TaskKind
from promptfed.shared.plain_text import counted
from promptfed.shared.secagg import MOST_CLIENTS
from promptfed.shared.seeds import sampling_order
from promptfed.shared.spec.section import ceil_fraction
from promptfed.shared.spec.sections import FINAL, SecureAggregationSpec

KINDS: tuple[TaskKind, ...] = ("train", "share", "mask", "confirm", "unmask")
TRAIN, SHARE, MASK, CONFIRM, UNMASK = range(5)
ATTEMPTS = 2  # at a phase, with the same training


def poisson_sample(key: str, round: int, names: Iterable[str], q: float) -> list[str]:
    """The ``names`` for which the first 8 bytes of HMAC-SHA256(key, "round|name") are below q·2⁶⁴."""
    secret = bytes.fromhex(key)

    def word(name: str) -> int:
        return int.from_bytes(hmac.digest(secret, f"{round}|{name}".encode(), "sha256")[:8], "big")

    return [name for name in names if word(name) < q * 2.0**64]


def first_asked(rules: Rules, run: Run, eligible: Sequence[str]) -> tuple[Sequence[str], int, float]:
    """The clients that a round's first phase asks, its K, and the expected number of counted answers (K̄)."""
    poisson = rules.poisson_key
    if poisson is not None:
        names = poisson_sample(poisson, run.round, eligible, rules.fraction)
        return names, len(names), rules.fraction * len(eligible)
    size = rules.sample_size(len(eligible))
    return sampling_order(rules.draw, run.round, list(eligible))[:size], size, float(size)


def present(rules: Rules, run: Run, stage: Stage) -> int:
    """K minus the clients that were withdrawn and not replaced."""
    least = rules.sample_size(0) if run.step == 0 else 1
    if rules.poisson_key is not None:
        least = 0  # it may ask nobody
    spare = max(0, len(stage.asks) - stage.sample_size)
    gone = len(stage.having("withdrawn", "discarded"))
    return max(least, stage.sample_size - max(0, gone - spare))


def answers_needed(rules: Rules, run: Run, stage: Stage) -> int:
    """The number of answers that close the stage; 0 if Poisson sampling asks no client, or all were withdrawn."""
    there = present(rules, run, stage)
    return 0 if there == 0 else max(rules.least_answers, ceil_fraction(rules.quorum, there))


def size_when_closed(rules: Rules, run: Run, stage: Stage) -> int:
    """The recorded K of a closed stage. With a fixed divisor (level ``client``) it does not change."""
    return stage.sample_size if rules.fixed_divisor else present(rules, run, stage)


def steps_of(phases: Iterable[PhasePlan], spec: SecureAggregationSpec) -> tuple[PhasePlan, ...]:
    """The round's stages if each of the method's ``phases`` is summed securely."""
    plans: list[PhasePlan] = []
    for number, phase in enumerate(phases):
        begin = len(plans)
        after = begin + len(KINDS) * ATTEMPTS
        for attempt in range(1, ATTEMPTS + 1):
            first = len(plans)
            following = first + len(KINDS) if attempt < ATTEMPTS else None
            name = phase.name if attempt == 1 else f"{phase.name}/{attempt}"
            for index, kind in enumerate(KINDS):
                step = SecureStep(index, attempt, number, phase.name, first, following, after)
                name_of_step = name if index == TRAIN else f"{name}/{kind}"
                plans.append(PhasePlan(name_of_step, phase.ask, kind, spec.step_seconds if index else None, step))
    return tuple(plans)


def step_answers_needed(spec: SecureAggregationSpec, step: SecureStep, cohort: int) -> int:
    """How many clients must answer ``step`` of an attempt for which ``cohort`` clients have sent keys."""
    threshold = max(2, ceil_fraction(spec.threshold, cohort))
    if step.index == TRAIN:
        return spec.minimum
    return max(threshold, spec.minimum) if step.index in (SHARE, MASK) else threshold


class WrongMoment(Exception):
    """The event is not allowed in the federation's state."""


class NotEnoughTrainers(Exception):
    """Too few trainers to start: ``enrolled`` of ``needed``."""

    def __init__(self, enrolled: int, needed: int):
        super().__init__(f"enrolled trainers: {enrolled}, needed: {needed}")
        self.enrolled = enrolled
        self.needed = needed


class Machine:
    """Any number of steps from a run, without copying all asks in each.

    ``run`` is the run as it has become. One that was read before a later ``advance`` is not to be used any more: both
    share the open stage's asks. The run that the machine was made of stays as it is.
    """

    def __init__(self, rules: Rules, run: Run):
        self.rules = rules
        self.run = run
        self.facts: list[run_state.Fact] = []
        self._asks: dict[str, AskStatus] | None = None  # our own copy of the open stage's

    def advance(self, event: run_state.Event) -> tuple[run_state.Fact, ...]:
        """The run after ``event``; returns the facts to store.

        Raises:
            WrongMoment: the event does not fit the run's state; nothing has changed.
            NotEnoughTrainers: a start with fewer trainers than the rules need.
            Others: use a new machine.
        """
        self.facts = []
        self._take(event)
        return tuple(self.facts)

    def _take(self, event: run_state.Event) -> None:
        match event:
            case run_state.Enrolled():
                self._enrolled(event)
            case run_state.Start(now):
                self._start(now)
            case run_state.StartRefused(reason):
                self._expect("enrolling")
                self._move("enrolling", reason)
            case run_state.Pause():
                self._expect("running")
                self._move("paused", None)
            case run_state.Resume(now):
                self._resume(now)
            case run_state.Cancel():
                self._end("cancelled", None)
            case run_state.Fail(reason):
                self._end("failed", reason)
            case run_state.Damaged(reason):
                self._damaged(reason)
            case run_state.Withdraw(name, discard, now):
                self._withdraw(name, discard, now)
            case run_state.Answered(name, now):
                self._settle_open(name, "answered", now)
            case run_state.AnsweredLast(name, now):
                self._answered_last(name, now)
            case run_state.SumInvalid(reason) | run_state.NotComputed(reason):
                self._expect("running")
                self._move("paused", reason)
            case run_state.Failed(name, now):
                self._settle_open(name, "failed", now)
            case run_state.LeftOut(names, now):
                self._left_out(names, now)
            case run_state.JobDone(now):
                self._job_done(now)
            case run_state.NoRise(now):
                self._no_rise(now)
            case run_state.Restarted(now):
                self._set_deadline(now)
                self._go_on(now)
            case run_state.Tick(now):
                self._go_on(now)

    # What operators and clients do

    def _enrolled(self, event: run_state.Enrolled) -> None:
        if self.run.state in ENDED:
            raise WrongMoment(self.run.state)
        before = self.run.members.get(event.name, Member(event.role))
        member = replace(before, active=True)
        self._set(members={**self.run.members, event.name: member})

    def _start(self, now: float) -> None:
        self._expect("enrolling")
        trainers = self.run.starters(self.rules)
        if len(trainers) < self.rules.min_clients:
            raise NotEnoughTrainers(len(trainers), self.rules.min_clients)
        self._join(self.run.newcomers())
        self._move("running", None)
        self._go_on(now)

    def _resume(self, now: float) -> None:
        self._expect("paused")
        stage = self.run.stage
        if self.run.reason == QUORUM_MISSED and stage is not None and not stage.closed:
            # A new attempt: those who failed may have been mended, and the one extension may be used again.
            again = [name for name in stage.having("failed") if self.run.members[name].active]
            self._set_stage(extended=False, asks={**stage.asks, **dict.fromkeys(again, "open")})
            self.facts.append(run_state.Extended(False))
            if again:
                self.facts.append(run_state.Asked(tuple(again)))
        self._move("running", None)
        self._set_deadline(now)
        self._go_on(now)

    def _damaged(self, reason: str) -> None:
        """Pause until the operator has put the damaged bytes back. Clients' answers are kept."""
        if self.run.state not in ("enrolling", "running"):
            raise WrongMoment(self.run.state)
        self._move("paused" if self.run.state == "running" else "enrolling", DAMAGED + reason)

    def _withdraw(self, name: str, discard: bool, now: float) -> None:
        if self.run.state in ENDED:
            raise WrongMoment(self.run.state)
        self._set(members={**self.run.members, name: replace(self.run.members[name], active=False)})
        stage = self.run.stage
        status = stage.asks.get(name) if stage is not None and not stage.closed else None
        if status in ("open", "failed"):
            self._settle(name, "withdrawn")
        elif status == "answered" and discard:
            self._settle(name, "discarded")
        self._go_on(now)

    def _settle_open(self, name: str, status: AskStatus, now: float) -> None:
        stage = self.run.stage
        if stage is None or stage.closed or stage.asks.get(name) != "open":
            raise WrongMoment(self.run.state)
        self._settle(name, status)
        self._go_on(now)

    def _answered_last(self, name: str, now: float) -> None:
        stage = self.run.stage
        if stage is None or stage.kind != "unmask" or stage.closed or stage.asks.get(name) != "open":
            raise WrongMoment(self.run.state)
        self._settle(name, "answered")
        assert self.run.stage is not None
        self._close(self.run.stage, self.run.stage.sample_size)
        self._set(due_job="aggregate")

    def _job_done(self, now: float) -> None:
        if self.run.due_job == "join":
            self._join(self.run.joining)
            self._set(due_job=None, joining=())
        elif self.run.due_job == "aggregate":
            self._set(due_job=None, cohort=(), previous=())
            plan = self._plan()
            self._complete(plan.secure.after if plan is not None and plan.secure is not None else None)
        elif self.run.due_job == "judge":
            self._set(due_job=None)
            self._complete()
        else:
            raise WrongMoment(self.run.state)
        self._go_on(now)

    def _no_rise(self, now: float) -> None:
        self._expect("running")
        if self.run.due_job != "judge":
            raise WrongMoment(self.run.state)
        self._set(due_job=None)
        self._complete()
        self._evaluate(FINAL, now)
        self._go_on(now)

    # How a federation goes on

    def _go_on(self, now: float) -> None:
        """Advance until the run waits for an answer, a deadline, tensor work or the operator."""
        while self.run.state == "running" and self.run.due_job is None:
            stage = self.run.stage
            moved = self._open_next(now) if stage is None else self._close_if_due(stage, now)
            if not moved:
                return

    def _open_next(self, now: float) -> bool:
        run = self.run
        plan = self.rules.phases(run.round) if run.round > 0 else ()
        if run.step == 0 and run.newcomers():
            self._set(due_job="join", joining=run.newcomers())
        elif run.step < len(plan):
            self._open_phase(plan[run.step], now)
        elif (name := self.rules.evaluation(run.round, run.step - len(plan))) is not None:
            self._evaluate(name, now)
        elif run.round < self.rules.last_round and run.step - len(plan) < 2:  # behind a final test there is no round
            self._set(round=run.round + 1, step=0, answered_first=(), sample_size=0, cohort=(), previous=())
        else:
            self._end("finished", self._why_early() if run.round < self.rules.rounds else None)
        return True

    def _evaluate(self, name: str, now: float) -> None:
        active = sorted(name for name, member in self.run.members.items() if member.active and member.joined)
        self._open("evaluate", name, active, len(active), now)

    def _why_early(self) -> str:
        if self.rules.patience is None:
            return BUDGET_SPENT
        waited = counted(self.rules.patience, "evaluation")
        return f"stopped after round {self.run.round}: no rise for {waited}"

    def _open_phase(self, plan: PhasePlan, now: float) -> None:
        run, expected = self.run, None
        names: Sequence[str] = run.eligible()
        if plan.secure is not None and plan.is_fixed:
            cohort = run.previous if plan.secure.index else run.cohort
            names = [name for name in cohort if run.members[name].active]
            size = len(names)
        elif run.step == 0:
            names, size, expected = first_asked(self.rules, run, run.eligible())
        else:
            gone = sum(not run.members[name].active for name in run.answered_first)
            size = max(1, run.sample_size - gone)
            names = names if plan.ask == "all" else [n for n in run.answered_first if run.members[n].active]
        self._open(plan.kind, plan.name, names, size, now, expected)

    def _open(
        self, kind: TaskKind, name: str, names: Sequence[str], size: int, now: float, expected: float | None = None
    ) -> None:
        """Open a stage for ``names``."""
        ordered = tuple(sorted(names))
        seconds = self.rules.seconds(self._plan())
        stage = Stage(kind, name, dict.fromkeys(ordered, "open"), size, now + seconds)
        self._set(stage=stage)
        there = float(size) if expected is None else expected
        self.facts.append(run_state.Opened(self.run.round, self.run.step, kind, name, ordered, size, there))
        self.facts.append(run_state.DeadlineSet(seconds))

    def _close_if_due(self, stage: Stage, now: float) -> bool:
        if now < stage.deadline and "open" in stage.asks.values():
            return False
        plan = self._plan()
        if stage.kind == "evaluate":
            self._close(stage, stage.sample_size)
            if self.rules.patience is None or stage.name == FINAL or self.run.round >= self.rules.last_round:
                self._complete()
            else:
                self._set(due_job="judge")
        elif plan is not None and plan.secure is not None:
            self._close_secure(stage, plan.secure, now)
        elif len(stage.having("answered")) >= answers_needed(self.rules, self.run, stage):
            self._close(stage, size_when_closed(self.rules, self.run, stage))
            self._set(due_job="aggregate")
        elif not stage.extended:
            self._extend(stage, now)
        elif self.rules.on_missed_quorum == "pause":
            self._move("paused", QUORUM_MISSED)
        else:
            self._end("failed", QUORUM_MISSED)
        return True

    def _close_secure(self, stage: Stage, step: SecureStep, now: float) -> None:
        """Go to the next step if there are enough answers, else to the next attempt. After a reveal there is none.

        Step unmask closes with the answer that opens the sum (`AnsweredLast`), never here.
        """
        assert self.rules.secure is not None
        answered = len(stage.having("answered"))
        needed = step_answers_needed(self.rules.secure, step, len(self.run.cohort))
        first = step.index == TRAIN and step.attempt == 1
        if first:
            needed = max(needed, answers_needed(self.rules, self.run, stage))
        if answered >= needed and step.index != UNMASK:
            size = size_when_closed(self.rules, self.run, stage) if first else stage.sample_size
            self._close(stage, size)
            self._complete()
        elif not stage.extended:
            self._extend(stage, now)
        else:
            self._give_up(stage, step, None if first or step.index == UNMASK else step.following)

    def _give_up(self, stage: Stage, step: SecureStep, following: int | None) -> None:
        """Go to the attempt that begins with step ``following``, if there is one."""
        if following is not None:
            for name in stage.having("open"):
                self._settle(name, "expired")
            self.facts.append(run_state.AttemptFailed(step.attempt))
            self._set(stage=None, step=following, previous=())
        elif self.rules.on_missed_quorum == "pause":
            self._move("paused", QUORUM_MISSED)
        else:
            self._end("failed", QUORUM_MISSED)

    def _left_out(self, names: Sequence[str], now: float) -> None:
        """A secure sum goes on without ``names``: in this attempt while no roster was told, else in the next one."""
        stage, plan = self.run.stage, self._plan()
        if stage is None or stage.closed or plan is None or plan.secure is None or plan.kind not in ("share", "mask"):
            raise WrongMoment(self.run.state)
        assert self.rules.secure is not None
        for name in stage.having("open", "answered"):
            if name in names:
                self._settle(name, "failed")

        def without(those: tuple[str, ...], leave: bool = True) -> tuple[str, ...]:
            return tuple(name for name in those if not leave or name not in names)

        first = without(self.run.answered_first, plan.secure.first == 0)
        previous = without(self.run.previous, plan.secure.index == SHARE)
        self._set(cohort=without(self.run.cohort), previous=previous, answered_first=first)
        assert self.run.stage is not None
        if plan.secure.index != SHARE or len(self.run.cohort) < self.rules.secure.minimum:
            self._give_up(self.run.stage, plan.secure, plan.secure.following)
        self._go_on(now)

    def _extend(self, stage: Stage, now: float) -> None:
        plan = self._plan()
        assert plan is not None
        first = self.run.step == 0
        if first and self.rules.join_when_extended and self.run.newcomers():
            self._set(due_job="join", joining=self.run.newcomers())
            return
        more = not plan.is_fixed and self.rules.poisson_key is None and (first or plan.ask == "all")
        added = [n for n in self.run.eligible() if n not in stage.asks] if more else []
        added = added if plan.secure is None else added[: MOST_CLIENTS - len(stage.asks)]
        self._set_stage(extended=True, asks={**stage.asks, **dict.fromkeys(added, "open")})
        self.facts.append(run_state.Extended(True))
        if added:
            self.facts.append(run_state.Asked(tuple(added)))
        self._set_deadline(now)

    def _close(self, stage: Stage, sample_size: int) -> None:
        for name in stage.having("open"):
            self._settle(name, "expired")
        counted = tuple(stage.having("answered"))
        self._set_stage(closed=True, sample_size=sample_size)
        plan = self._plan()
        secure = plan.secure if plan is not None else None
        if secure is not None:
            self._set(previous=counted)
            if secure.index == TRAIN:
                self._set(cohort=counted)
            if secure.index == MASK and secure.number == 0:
                self._set(answered_first=counted)
        if stage.kind == "train" and self.run.step == 0:
            self._set(answered_first=counted, sample_size=sample_size)
        self.facts.append(run_state.Closed(counted, sample_size))

    def _complete(self, following: int | None = None) -> None:
        self._set(stage=None, step=self.run.step + 1 if following is None else following)
        self.facts.append(run_state.Completed())

    def _end(self, state: FederationState, reason: str | None) -> None:
        if self.run.state in ENDED:
            raise WrongMoment(self.run.state)
        stage = self.run.stage
        if stage is not None:
            for name in stage.having("open"):
                self._settle(name, "cancelled")
        self._set(stage=None, due_job=None, joining=())
        self._move(state, reason)

    # Small changes

    def _set(self, **changes: object) -> None:
        self.run = replace(self.run, **changes)  # type: ignore[arg-type]

    def _set_stage(self, **changes: object) -> None:
        assert self.run.stage is not None
        self._set(stage=replace(self.run.stage, **changes))  # type: ignore[arg-type]

    def _settle(self, name: str, status: AskStatus) -> None:
        assert self.run.stage is not None
        if self._asks is None or self.run.stage.asks is not self._asks:
            self._asks = dict(self.run.stage.asks)
            self._set_stage(asks=self._asks)
        self._asks[name] = status
        self.facts.append(run_state.Settled(name, status))

    def _set_deadline(self, now: float) -> None:
        if self.run.stage is not None and not self.run.stage.closed:
            seconds = self.rules.seconds(self._plan())
            self._set_stage(deadline=now + seconds)
            self.facts.append(run_state.DeadlineSet(seconds))

    def _plan(self) -> PhasePlan | None:
        return self.rules.plan(self.run.round, self.run.step)

    def _join(self, names: tuple[str, ...]) -> None:
        joined = {name: replace(self.run.members[name], joined=True) for name in names}
        self._set(members={**self.run.members, **joined})
        if names:
            self.facts.append(run_state.Joined(names))

    def _move(self, state: FederationState, reason: str | None) -> None:
        self._set(state=state, reason=reason)
        self.facts.append(run_state.Moved(state, reason))

    def _expect(self, state: FederationState) -> None:
        if self.run.state != state:
            raise WrongMoment(self.run.state)
