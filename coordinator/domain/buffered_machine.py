"""The round machine of asynchronous rounds (`ScheduleSpec`).

A round closes with the buffer's last answer. Clients that train then go on, and their tasks move to the next round. A
client answers at most once in a round. `Run.busy` names the clients that train, `Run.early` those whose answers came
while no round was open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from promptfed.coordinator.domain import facts
from promptfed.coordinator.domain.choice import chosen
from promptfed.coordinator.domain.round_machine import Machine, WrongMoment
from promptfed.coordinator.domain.run_state import QUORUM_MISSED, AskStatus, PhasePlan, Stage
from promptfed.shared.messages import ENDED, FederationState, TaskKind
from promptfed.shared.seeds import sampling_order
from promptfed.shared.spec.schedule import ScheduleSpec
from promptfed.shared.spec.spec_section import ceil_fraction


class BufferedMachine(Machine):
    """The steps in which asynchronous rounds differ from others."""

    _nobody_is_free = False  # known for the next look at the stage, which would go through all clients
    _counted: tuple[Mapping[str, AskStatus], Counter[AskStatus]] | None = None  # of these very asks

    @property
    def _schedule(self) -> ScheduleSpec:
        assert self.rules.schedule is not None
        return self.rules.schedule

    @property
    def _trains(self) -> bool:
        """Whether a round is open."""
        stage = self.run.stage
        return stage is not None and stage.kind == "train" and not stage.closed

    # Rounds

    def _open_phase(self, plan: PhasePlan, now: float) -> None:
        late = self._late()
        size = min(self._schedule.buffer, max(1, len(self.run.eligible())))
        names = self._idle(late) if len(self.run.early) < size else []
        self._open(plan.kind, plan.name, names, size, now)
        assert self.run.stage is not None
        self._set_stage(asks={**late, **self.run.stage.asks})
        self._set(busy={**self.run.busy, **dict.fromkeys(names, self.run.round)}, early=())
        if late:
            self.facts.append(facts.Carried(tuple(sorted(late))))

    def _late(self) -> dict[str, AskStatus]:
        """The clients with tasks of earlier rounds that belong to the open one."""
        return {**dict.fromkeys(self.run.busy, "open"), **dict.fromkeys(self.run.early, "answered")}

    def _idle(self, asked: Collection[str]) -> Collection[str]:
        """Eligible clients that are not ``asked`` yet, as many as may train now, with reasons where there are any."""
        eligible = self.run.eligible()
        room = max(0, (self._schedule.concurrency or len(eligible)) - len(self.run.busy))
        idle = [name for name in eligible if name not in asked and name not in self.run.busy]
        if self.rules.choice is not None:
            return chosen(self.rules, self.run, idle, room)
        return sampling_order(self.rules.draw, self.run.round, idle)[:room]

    def _open(
        self, kind: TaskKind, name: str, names: Collection[str], size: int, now: float, expected: float | None = None
    ) -> None:
        if kind == "evaluate":  # Who trains is asked as soon as that is over.
            names = [name for name in names if name not in self.run.busy]
        super()._open(kind, name, names, size, now, expected)

    def _close_if_due(self, stage: Stage, now: float) -> bool:
        if not self._nobody_is_free:
            stage = self._filled(stage)
        self._nobody_is_free = False
        is_late = now >= stage.deadline
        if stage.kind == "evaluate":
            if ("open" in stage.asks.values() or self.run.busy) and not is_late:
                return False
            self._close(stage, stage.sample_size)
            self._complete()
            return True
        tally = self._tally(stage)
        answered, size = tally["answered"], stage.sample_size
        if answered + tally["open"] < size:
            size = self._size(stage)
        if answered < size and tally["open"] and not is_late:
            return False
        if answered >= max(1, ceil_fraction(self.rules.quorum, size)):
            self._close(stage, answered)
            self._set(due_job="aggregate")
        elif not stage.extended:
            self._extend(stage, now)
        elif self.rules.on_missed_quorum == "pause":
            self._move("paused", QUORUM_MISSED)
        else:
            self._end("failed", QUORUM_MISSED)
        return True

    def _size(self, stage: Stage) -> int:
        """The buffer, of no more clients than there are."""
        return min(stage.sample_size, max(1, len(self.run.eligible())))

    def _filled(self, stage: Stage) -> Stage:
        """The open stage with those asked in addition who can be asked now."""
        names: Collection[str]
        if stage.kind == "evaluate":
            present = sorted(name for name, member in self.run.members.items() if member.active and member.joined)
            names = [name for name in present if name not in stage.asks and name not in self.run.busy]
        else:
            # A resume asks failed clients again.
            again = {name: self.run.round for name in stage.having("open") if name not in self.run.busy}
            self._set(busy={**self.run.busy, **again})
            names = self._idle(stage.asks) if len(stage.having("answered")) < self._size(stage) else []
            self._set(busy={**self.run.busy, **dict.fromkeys(names, self.run.round)})
        if names:
            stage = replace(stage, asks={**stage.asks, **dict.fromkeys(names, "open")})
            self._set(stage=stage)
            self.facts.append(facts.Asked(tuple(names), self._note_asked(names)))
        return stage

    def _extend(self, stage: Stage, now: float) -> None:
        self._set_stage(extended=True)
        self.facts.append(facts.Extended(True))
        self._set_deadline(now)

    def _close(self, stage: Stage, sample_size: int) -> None:
        if stage.kind == "evaluate":
            super()._close(stage, sample_size)
            return
        # What would be too late in the next round is so from now on: no answer that was accepted is dropped for it.
        oldest = self.run.round + 1 - self._schedule.max_staleness
        for name, round in sorted(self.run.busy.items()):
            if round < oldest or self.run.round == self.rules.last_round:
                self._settle(name, "expired")
        assert self.run.stage is not None
        asks = {name: status for name, status in self.run.stage.asks.items() if status != "open"}
        counted = tuple(stage.having("answered"))
        self._set_stage(closed=True, sample_size=sample_size, asks=asks)
        self._set(answered_first=counted, sample_size=sample_size)
        self.facts.append(facts.Closed(counted, sample_size))

    def _reopen(self, name: str) -> None:
        super()._reopen(name)
        assert self.run.stage is not None
        self._set_stage(asks={**self.run.stage.asks, **self._late()})
        self._set(early=())

    # Clients

    def _tally(self, stage: Stage) -> Counter[AskStatus]:
        """How many asks have each status: kept while answers come in, each of which would else count all anew."""
        if self._counted is None or self._counted[0] is not stage.asks:
            self._counted = stage.asks, Counter(stage.asks.values())
        return self._counted[1]

    def _settle(self, name: str, status: AskStatus) -> None:
        assert self.run.stage is not None
        tally = self._tally(self.run.stage)
        tally[self.run.stage.asks[name]] -= 1
        tally[status] += 1
        super()._settle(name, status)
        self._counted = self.run.stage.asks, tally
        if self.run.stage.kind == "train":
            self._forget(name)

    def _settle_open(self, name: str, status: AskStatus, now: float) -> None:
        if self._trains or name not in self.run.busy:
            # Whoever could be asked beside those that train was asked before. An answer adds nobody to them.
            self._nobody_is_free = status == "answered" and self._trains and self._schedule.concurrency is None
            super()._settle_open(name, status, now)
            return
        self._leave(name, status)
        if status == "answered":
            self._set(early=(*self.run.early, name))
        self._go_on(now)

    def _withdraw(self, name: str, discard: bool, now: float) -> None:
        if self.run.state in ENDED:
            raise WrongMoment(self.run.state)
        if name in self.run.busy and not self._trains:
            self._leave(name, "withdrawn")
        elif discard and name in self.run.early:
            self._set(early=tuple(other for other in self.run.early if other != name))
            self.facts.append(facts.Dropped(name))
        super()._withdraw(name, discard, now)

    def _end(self, state: FederationState, reason: str | None) -> None:
        if self.run.state in ENDED:
            raise WrongMoment(self.run.state)
        for name in sorted(self.run.busy):
            self._leave(name, "cancelled")
        self._set(early=())
        super()._end(state, reason)

    def _leave(self, name: str, status: AskStatus) -> None:
        """Settle a task outside its stage, or of a stage that ends with it."""
        stage = self.run.stage
        if self._trains and stage is not None:
            self._set_stage(asks={**stage.asks, name: status})
        self._forget(name)
        self.facts.append(facts.Settled(name, status))

    def _forget(self, name: str) -> None:
        busy = dict(self.run.busy)
        busy.pop(name, None)
        self._set(busy=busy)
