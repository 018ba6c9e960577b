"""The engine: holds all federations, changes them one transaction at a time, and moves them on.

Changes run in threads (requests' own, or the one for tensor work); the driver on the event loop only looks at the
clock and at what is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as finished
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection

from promptfed.coordinator import json_logs
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Live
from promptfed.coordinator.domain.round_machine import WrongMoment
from promptfed.coordinator.domain.run_state import ENDED, CannotStart, Fail, Restarted, Tick
from promptfed.coordinator.engine import jobs, recovery, retention
from promptfed.coordinator.engine.last_seen import Activity
from promptfed.coordinator.engine.metrics import Measures
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.engine.wakeups import Bells, wait
from promptfed.coordinator.problems import MethodAbsent, NotFound, Refusal
from promptfed.coordinator.store.backend import DatabaseAway, InUse
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.database import Database

log = logging.getLogger("promptfed.coordinator")

FLUSH_SECONDS = 2.0
RETRY_SECONDS = 2.0
STOP_SECONDS = 1.0
HANG_SECONDS = 30.0  # after which a database that neither answers nor refuses is given up
EVENTS = "*events"

T = TypeVar("T")


class Stopped(Exception):
    """The engine has let go of its data folder: what is still computing must not write any more."""


class Engine:
    """All federations of one data folder."""

    def __init__(self, database: Database, blobs: Blobs, measures: Measures):
        self.database = database
        self.blobs = blobs
        self.measures = measures
        self.bells = Bells()
        self.activity = Activity(database)
        self.lives: dict[str, Live] = {}
        self.retired: dict[str, int] = {}
        self.configs: dict[str, tuple[object, object, str]] = {}
        self.ready = False
        self.left_behind: set[asyncio.Task[None]] = set()
        self._closed = False
        self._reloading = False
        self._told = ""
        self._turn = threading.RLock()
        self._tensors = ThreadPoolExecutor(1, "tensors")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: asyncio.Task[None] | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._asked: set[Future[Any]] = set()
        self._refused_starts: dict[str, object] = {}

    # Life

    async def start(self) -> None:
        """Take up all federations where they stood, and drive them."""
        self._loop = asyncio.get_running_loop()
        self.database.on_away = lambda: self.ring([])
        await asyncio.to_thread(self._load)
        await asyncio.to_thread(retention.sweep, self)
        self._driver = asyncio.create_task(self._drive(), name="driver")
        self.ready = True

    def stop_waiting(self) -> None:
        """Wake every long poll and stream for good. Call it on the event loop."""
        self.ready = False
        self.bells.silence()

    async def stop(self) -> None:
        """End the driver; a job that is under way is waited for a little, and done again at the next start."""
        self.stop_waiting()
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        if self._jobs:
            _, self.left_behind = await asyncio.wait(self._jobs.values(), timeout=STOP_SECONDS)
            for job in self.left_behind:
                job.cancel()
        await asyncio.to_thread(finished, list(self._asked), STOP_SECONDS)
        self._tensors.shutdown(wait=False, cancel_futures=True)
        closing = asyncio.create_task(asyncio.to_thread(self._close))
        if not (await asyncio.wait([closing], timeout=STOP_SECONDS))[0]:
            self.database.cut("the database does not answer while the coordinator ends")
        await closing

    def _close(self) -> None:
        with contextlib.suppress(DatabaseAway):
            self.activity.flush()
        with self._turn:
            self._closed = True

    def _load(self) -> None:
        with self.database.read() as session:
            self.lives = recovery.load_all(session, clock.monotonic())
        for live in self.lives.values():
            if live.absent is not None:
                log.error("%s waits for its method: %s", live.name, live.absent, extra=self._where(live.id))
            elif live.run.state not in ENDED:
                with self.change(live.id) as change:
                    change.send(Restarted(clock.monotonic()))

    @property
    def away(self) -> bool:
        """Whether the database is away, or what it holds is not taken up again yet."""
        return self.database.away is not None or self._reloading

    def _come_back(self) -> None:
        with self._turn:
            if self._closed:
                raise Stopped
            self._reloading = True
            self.database.come_back()
            # A commit whose answer was lost may have happened: what is in memory is not to be trusted.
            self._load()
            self._reloading = False
        log.info("the database is back")

    async def compute(self, job: Callable[[], T]) -> T:
        """Carry out ``job`` where all tensor work is done: one at a time, off the event loop."""
        future = self._tensors.submit(job)
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return await asyncio.wrap_future(future)

    @property
    def computing(self) -> bool:
        """Whether tensor work is still under way after a stop: nobody waits for it any more."""
        return bool(self.left_behind) or any(future.running() for future in self._asked)

    # Changes

    def live(self, id: str) -> Live:
        """The federation with this id. Raises NotFound, MethodAbsent."""
        live = self.lives.get(id)
        if live is None:
            raise NotFound("there is no such federation")
        if live.absent is not None:
            raise MethodAbsent(f"{live.name} waits for its method: {live.absent}; then start the coordinator again")
        return live

    def find(self, id_or_name: str) -> Live:
        """The federation with this id or name. Raises NotFound, MethodAbsent."""
        live = self.lives.get(id_or_name)
        if live is None:
            live = next((one for one in self.lives.values() if one.name == id_or_name), None)
        if live is None:
            raise NotFound(f"there is no federation {id_or_name[:100]!r}")
        return self.live(live.id)

    @contextmanager
    def change(self, id: str) -> Iterator[Change]:
        """One transaction on one federation. What it leads to is seen by others only once it is on the disk."""
        with self._turn:
            if self._closed:
                raise Stopped
            with self.database.write() as session:
                change = Change(session, self.live(id))
                yield change
            before = self.lives[id].run
            self.lives = {**self.lives, id: change.live}
            self.measures.observe(change, before)
        self._announce(change)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """A block in which nothing else changes."""
        with self._turn:
            yield

    def add(self, live: Live) -> None:
        """Take up a federation that has just been created."""
        with self._turn:
            self.lives = {**self.lives, live.id: live}
        self.ring([])

    def forget(self, id: str) -> None:
        """Let go of a federation that has just been deleted."""
        with self._turn:
            gone = self.lives.get(id)
            self.configs.pop(id, None)
            self.lives = {key: live for key, live in self.lives.items() if key != id}
        self.ring([(id, EVENTS), *((id, name) for name in (gone.clients if gone else ()))])

    def ring(self, keys: list[tuple[str, str]]) -> None:
        """Wake those who wait for ``keys``, and the driver."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.bells.ring, [*keys, "driver"])

    def _where(self, id: str) -> dict[str, Any]:
        live = self.lives.get(id)
        return json_logs.where(live) if live is not None else {"federation": id}

    def _announce(self, change: Change) -> None:
        live = change.live
        for kind, data in change.told:
            log.info(kind, extra=json_logs.of_event(live.name, data))
        names = live.clients if change.everyone else change.wake
        self.ring([(live.id, EVENTS), *((live.id, name) for name in names)])

    # Driving

    async def _drive(self) -> None:
        flushed = clock.monotonic()
        while not self.bells.silenced:
            bell = self.bells.listen("driver")
            if self.away and not await self._is_back():
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for live in self.lives.values():
                self._look_at(live)
            if clock.monotonic() - flushed > FLUSH_SECONDS:
                await self._flush()
                flushed = clock.monotonic()
            await wait(bell, self._pause())

    async def _is_back(self) -> bool:
        try:
            await asyncio.to_thread(self._come_back)
        except (DatabaseAway, InUse) as error:
            if str(error) != self._told:
                log.warning("%s", error)
            self._told = str(error)
            return False
        except SQLAlchemyError:
            log.exception("cannot take up the federations again")
            return False
        self._told = ""
        self.bells.ring_all()
        return True

    def _pause(self) -> float:
        now = clock.monotonic()
        deadlines = [
            live.run.stage.deadline - now
            for live in self.lives.values()
            if live.run.state == "running" and live.run.stage is not None and live.id not in self._jobs
            if live.absent is None
        ]
        return max(0.0, min([FLUSH_SECONDS, *deadlines]))

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await asyncio.to_thread(self._beat)
        except TimeoutError:
            self.database.cut(f"the database has not answered for {HANG_SECONDS:g} s")
        except SQLAlchemyError:
            log.exception("cannot write down who was seen")
        except DatabaseAway:
            pass  # That is told already.

    def _beat(self) -> None:
        self.database.beat()
        self.activity.flush()

    def _look_at(self, live: Live) -> None:
        job = self._due(live)
        if job is not None and live.id not in self._jobs:
            task = asyncio.create_task(self._carry_out(live.id, job), name=f"job {live.id}")
            self._jobs[live.id] = task

    def _due(self, live: Live) -> Callable[[Engine, str], None] | None:
        run = live.run
        if live.absent is not None:
            return None
        if run.state == "running" and run.work is not None:
            return jobs.join if run.work == "join" else jobs.aggregate
        if run.state in ("running", "paused") and any(t.payload_sha256 is None for t in live.tasks.values()):
            return jobs.fill_payloads
        if run.state == "running" and run.stage is not None and run.stage.deadline <= clock.monotonic():
            return _tick
        if run.state == "enrolling" and self._could_start(live):
            return _start_by_itself
        if retention.has_to_retire(live, self.retired.get(live.id, 0)):
            return retention.retire
        return None

    def _could_start(self, live: Live) -> bool:
        if live.spec.start != "when_ready" or len(live.run.trainers()) < live.rules.min_clients:
            return False
        return self._refused_starts.get(live.id) != _start_key(live)

    def start_refused(self, live: Live) -> None:
        """Do not try to start ``live`` by itself again before its clients or its initial state change."""
        self._refused_starts[live.id] = _start_key(live)

    async def _carry_out(self, id: str, job: Callable[[Engine, str], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._tensors, self._attempt, id, job)
        except DatabaseAway:
            pass  # That is told already; what is due is looked at again once the database is back.
        except Exception:
            # The disk may have room again soon: the same job is due again then.
            log.exception("the store failed; trying again", extra=self._where(id))
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            del self._jobs[id]
            self.bells.ring(["driver"])

    def _attempt(self, id: str, job: Callable[[Engine, str], None]) -> None:
        try:
            job(self, id)
        except (NotFound, WrongMoment, Stopped):
            pass  # Deleted, cancelled or moved on meanwhile.
        except (OSError, OperationalError, NoConnection, DatabaseAway):
            raise
        except Exception as error:
            log.exception("the method failed", extra=self._where(id))
            with contextlib.suppress(NotFound, WrongMoment, Stopped), self.change(id) as change:
                reason = f"{type(error).__name__}: {error}".replace("\0", "\\0")  # PostgreSQL's text holds no NUL
                change.send(Fail(reason[:2000]))


def _tick(engine: Engine, id: str) -> None:
    with engine.change(id) as change:
        change.send(Tick(clock.monotonic()))


def _start_key(live: Live) -> object:
    return (tuple(sorted(live.run.members.items(), key=lambda item: item[0])), live.supplied_state)


def _start_by_itself(engine: Engine, id: str) -> None:
    live = engine.live(id)
    try:
        jobs.start(engine, id)
    except Refusal as refusal:
        engine.start_refused(live)
        with engine.change(id) as change:
            change.send(CannotStart(f"{refusal.kind}: {refusal.detail}"))
