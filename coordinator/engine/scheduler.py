"""The scheduler: moves federations on, by the clock and by what is due.

It runs on the event loop and only looks; what is due is carried out on the thread for tensor work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection

from promptfed.coordinator.aggregation.global_state import NoTorch
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.engine import jobs, log_lines, retention
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.registry import Registry, wait
from promptfed.coordinator.engine.token_expiry import mark_expired
from promptfed.coordinator.problems import NotFound, Refusal
from promptfed.coordinator.store.backend import DatabaseAway, InUse
from promptfed.coordinator.store.blobs import DamagedBlob
from promptfed.shared.machine import give_back
from promptfed.shared.messages import ENDED

log = logging.getLogger("promptfed.coordinator")
FLUSH_SECONDS = 2.0
TRIM_SECONDS = 30.0  # between two times that free memory goes back to the system, a few milliseconds each
RETRY_SECONDS = 2.0
SWEEP_SECONDS = 0.5  # that a start waits for the removal of what crashes have left
RETIRE_SECONDS = 1.0  # between two removals of what a running federation's rounds have left: quick rounds share one
STOP_SECONDS = 1.0
HANG_SECONDS = 30.0  # after which a database that neither answers nor refuses is given up

MOVED_ON = (NotFound, WrongMoment, RegistryClosed)
"""The federation was deleted, has ended or moved on meanwhile."""

Job = Callable[[Registry, str], None]
"""What is carried out on the thread for tensor work: of this registry, for the federation with this id."""


class Scheduler:
    """Drives the federations of one registry."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._driver: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._refused_starts: dict[str, object] = {}
        self._retired_at: dict[str, float] = {}
        self._last_warning = ""

    async def start(self) -> None:
        """Take up all federations where they stood, and drive them."""
        await self._registry.open()
        self._sweeping = asyncio.create_task(self._sweep(), name="sweeping")
        await asyncio.wait({self._sweeping}, timeout=SWEEP_SECONDS)
        self._driver = asyncio.create_task(self._drive(), name="driver")
        self._registry.ready = True

    async def stop(self) -> None:
        """End the driver; a job that is under way is waited for a little, and done again at the next start."""
        self._registry.stop_waiting()
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        for working in (self._sweeping, self._deleting):
            if working is not None:
                await asyncio.wait({working}, timeout=STOP_SECONDS)
        if self._jobs:
            _, overdue = await asyncio.wait(self._jobs.values(), timeout=STOP_SECONDS)
            for job in overdue:
                job.cancel()
        await self._registry.stop_computing(STOP_SECONDS)
        closing = asyncio.create_task(asyncio.to_thread(self._registry.close))
        if not (await asyncio.wait([closing], timeout=STOP_SECONDS))[0]:
            self._registry.database.cut("the database does not answer while the coordinator ends")
        await closing

    async def _sweep(self) -> None:
        """Remove what crashes have left of blobs. A start waits a little for it, and not for that of a large store."""
        try:
            await asyncio.to_thread(retention.sweep, self._registry)
        except (DatabaseAway, RegistryClosed):
            pass  # The next start does it.
        except (SQLAlchemyError, OSError):
            log.exception("what crashes have left of blobs cannot be removed before the next start")

    async def _drive(self) -> None:
        flushed, trimmed = -math.inf, clock.monotonic()  # the first beat is at once
        while not self._registry.wakeups.closed:
            wakeup = self._registry.wakeups.listen("driver")
            if self._registry.away and not await self._is_back():
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for federation in self._registry.federations.values():
                self._look_at(federation)
            if self._registry.leftovers and self._deleting is None:
                self._deleting = asyncio.create_task(self._delete_leftovers(), name="deleting")
            if clock.monotonic() - flushed > FLUSH_SECONDS:
                await self._flush()
                flushed = clock.monotonic()
            if clock.monotonic() - trimmed > TRIM_SECONDS:
                await asyncio.to_thread(give_back)
                trimmed = clock.monotonic()
            await wait(wakeup, self._pause())

    async def _is_back(self) -> bool:
        try:
            await asyncio.to_thread(self._registry.come_back)
        except (DatabaseAway, InUse) as error:
            if str(error) != self._last_warning:
                log.warning("%s", error)
            self._last_warning = str(error)
            return False
        except SQLAlchemyError:
            log.exception("cannot take up the federations again")
            return False
        self._last_warning = ""
        self._registry.wakeups.wake_all()
        return True

    def _pause(self) -> float:
        now = clock.monotonic()
        deadlines = [
            federation.run.stage.deadline - now
            for federation in self._registry.federations.values()
            if federation.run.state == "running"
            and federation.run.stage is not None
            and federation.id not in self._jobs
            and federation.absent is None
        ]
        return max(0.0, min([FLUSH_SECONDS, *deadlines]))

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await asyncio.to_thread(self._beat)
        except TimeoutError:
            self._registry.database.cut(f"the database has not answered for {HANG_SECONDS:g} s")
        except SQLAlchemyError:
            log.exception("cannot write down who was seen, or which tokens have expired")
        except DatabaseAway:
            pass  # That is told already.

    def _beat(self) -> None:
        self._registry.database.beat()
        self._registry.last_seen.flush()
        mark_expired(self._registry)

    async def _delete_leftovers(self) -> None:
        try:
            await asyncio.to_thread(retention.finish, self._registry)
        except (DatabaseAway, RegistryClosed):
            pass  # It is tried again when the database is back, and at the next start.
        except (SQLAlchemyError, OSError):
            log.exception("what deleted federations have left cannot be deleted")
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._deleting = None

    def _look_at(self, federation: Federation) -> None:
        job = self._due(federation)
        if job is not None and federation.id not in self._jobs:
            task = asyncio.create_task(self._carry_out(federation.id, job), name=f"job {federation.id}")
            self._jobs[federation.id] = task
            if job is retention.retire:
                self._retired_at[federation.id] = clock.monotonic()

    def _due(self, federation: Federation) -> Job | None:
        run = federation.run
        if federation.absent is not None:
            return None
        if run.state == "running" and run.due_job is not None:
            return {"join": jobs.join, "aggregate": jobs.aggregate, "judge": jobs.judge}[run.due_job]
        lacks_payloads = any(task.payload_sha256 is None for task in federation.tasks.values())
        if run.state in ("running", "paused") and not run.is_damaged and lacks_payloads:
            return jobs.fill_payloads
        if run.state == "running" and run.stage is not None and run.stage.deadline <= clock.monotonic():
            return _tick
        if run.state == "enrolling" and self._could_start(federation):
            return self._start_by_itself
        if retention.has_to_retire(federation, self._registry.retired.get(federation.id, 0)):
            last = self._retired_at.get(federation.id)
            if last is None or run.state in ENDED or clock.monotonic() - last >= RETIRE_SECONDS:
                return retention.retire
        return None

    def _could_start(self, federation: Federation) -> bool:
        if federation.spec.start != "when_ready":
            return False
        if len(federation.run.starters(federation.rules)) < federation.rules.min_clients:
            return False
        return self._refused_starts.get(federation.id) != _start_key(federation)

    def _start_by_itself(self, registry: Registry, id: str) -> None:
        federation = registry.get(id)
        try:
            jobs.start(registry, id)
        except Refusal as refusal:
            # Not to be tried again before its clients or its initial state change.
            self._refused_starts[id] = _start_key(federation)
            with registry.change(id) as change:
                change.send(run_state.StartRefused(f"{refusal.kind}: {refusal.detail}"))

    async def _carry_out(self, id: str, job: Job) -> None:
        try:
            await self._registry.compute(lambda: self._attempt(id, job))
        except DatabaseAway:
            pass  # That is told already; what is due is looked at again once the database is back.
        except Exception:
            # The disk may have room again soon: the same job is due again then.
            log.exception("the store failed; trying again", extra=self._where(id))
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._jobs[id]
            self._registry.wakeups.wake(["driver"])

    def _where(self, id: str) -> dict[str, Any]:
        federation = self._registry.federations.get(id)
        return log_lines.where(federation) if federation is not None else {"federation": id}

    def _attempt(self, id: str, job: Job) -> None:
        try:
            job(self._registry, id)
        except MOVED_ON:
            pass
        except DamagedBlob as error:
            self._pause_damaged(id, f"{error}: put it back from a backup, then resume")
        except (OSError, OperationalError, NoConnection, DatabaseAway):
            raise
        except DatabaseError as error:
            if not self._registry.database.is_damaged(error):
                self._fail(id, error)
                return
            self._pause_damaged(id, self._registry.database.cannot_be_read(error))
        except NoTorch as error:
            log.error("%s", error, extra=self._where(id))
            with contextlib.suppress(*MOVED_ON), self._registry.change(id) as change:
                change.send(run_state.NotComputed(f"{error}; then resume"))
        except Exception as error:
            self._fail(id, error)

    def _pause_damaged(self, id: str, text: str) -> None:
        """Pause a federation whose stored bytes are damaged; one that enrols is not started by itself."""
        log.error("%s", text, extra=self._where(id))
        with contextlib.suppress(*MOVED_ON):
            self._refused_starts[id] = _start_key(self._registry.get(id))
            with self._registry.change(id) as change:
                change.send(run_state.Damaged(text))

    def _fail(self, id: str, error: Exception) -> None:
        log.error("the method failed", exc_info=error, extra=self._where(id))
        with contextlib.suppress(*MOVED_ON), self._registry.change(id) as change:
            reason = f"{type(error).__name__}: {error}".replace("\0", "\\0")  # PostgreSQL's text holds no NUL
            change.send(run_state.Fail(reason[:2000]))


def _tick(registry: Registry, id: str) -> None:
    with registry.change(id) as change:
        change.send(run_state.Tick(clock.monotonic()))


def _start_key(federation: Federation) -> object:
    return (tuple(sorted(federation.run.members.items(), key=lambda item: item[0])), federation.supplied_state)
