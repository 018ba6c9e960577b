"""The registry: holds all federations in memory, looks them up, and changes them one transaction at a time.

A change wakes the requests that wait for it, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prometheus_client import Gauge
from sqlalchemy import select
from starlette.types import Receive

from promptfed.coordinator.aggregation.secure_sums import Attempt
from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import log_lines, recovery
from promptfed.coordinator.engine.audit import Operator, operator_of
from promptfed.coordinator.engine.committer import Committer, RegistryClosed
from promptfed.coordinator.engine.last_seen import LastSeen
from promptfed.coordinator.engine.metrics import Metrics
from promptfed.coordinator.engine.recorder import Change, Changes
from promptfed.coordinator.problems import MethodAbsent, NotFound
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import OperatorRow
from promptfed.coordinator.store.writable import Writable
from promptfed.shared.messages import ENDED, TaskConfig
from promptfed.shared.privacy.noise import Noise, SecretNoise

log = logging.getLogger("promptfed.coordinator")
HELD = 2  # requests of one client that wait at a time: a newer one ends the oldest
EVENTS = "*events"
T = TypeVar("T")


class Wakeups:
    """One-shot events by key. Listen first, then look, then wait: no wakeup is missed."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, asyncio.Event] = {}
        self.closed = False

    def listen(self, key: Hashable) -> asyncio.Event:
        """The event that the next wakeup for ``key`` sets."""
        wakeup = self._waiting.setdefault(key, asyncio.Event())
        if self.closed:
            wakeup.set()
        return wakeup

    def wake(self, keys: Iterable[Hashable]) -> None:
        """Wake those who listen for one of ``keys``."""
        for key in keys:
            wakeup = self._waiting.pop(key, None)
            if wakeup is not None:
                wakeup.set()

    def wake_all(self) -> None:
        """Wake everybody who listens now."""
        self.wake(list(self._waiting))

    def close(self) -> None:
        """Wake everybody, now and from now on: nothing more is to be waited for."""
        self.closed = True
        self.wake_all()


async def wait(wakeup: asyncio.Event, seconds: float) -> bool:
    """Whether ``wakeup`` came within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await wakeup.wait()
    except TimeoutError:
        return False
    return True


@dataclass(eq=False)
class Wait:
    """A request that waits; ``over``: its caller has gone, or has begun newer ones."""

    over: bool = False


class Waits:
    """Requests that wait, by client: at most `HELD` of each, and none longer than its connection lasts."""

    def __init__(self, wakeups: Wakeups, waiting: Gauge):
        self._wakeups = wakeups
        self._waiting = waiting
        self._by_key: dict[Hashable, list[Wait]] = {}

    @contextmanager
    def begun(self, key: Hashable, receive: Receive | None) -> Iterator[Wait]:
        """A block in which a request waits; ``receive`` tells that its caller has gone. None: it does not wait."""
        wait = Wait()
        if receive is None:
            yield wait
            return
        waiting = self._by_key.setdefault(key, [])
        waiting.append(wait)
        for older in waiting[:-HELD]:
            self._end(key, older)
        watch = asyncio.get_running_loop().create_task(self._until_gone(key, wait, receive))
        self._waiting.inc()
        try:
            yield wait
        finally:
            self._waiting.dec()
            watch.cancel()
            waiting.remove(wait)
            if not waiting and self._by_key.get(key) is waiting:
                del self._by_key[key]

    async def _until_gone(self, key: Hashable, wait: Wait, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(key, wait)

    def _end(self, key: Hashable, wait: Wait) -> None:
        wait.over = True
        self._wakeups.wake([key])


class Registry:
    """All federations of one data folder.

    ``operators``: their tokens by digest. ``ready``: federations are taken up, and driven. ``retired``: up to which
    round a federation's tensors are removed.
    ``leftovers``: deleted federations may have left rows behind.
    """

    def __init__(self, database: Database, blobs: Blobs, metrics: Metrics, noise: Noise | None = None):
        """``noise``: where noise and sampling that nobody may foresee come from; simulations hand in seeded ones."""
        self.noise = noise or SecretNoise()
        self.database = database
        self.blobs = blobs
        self.metrics = metrics
        self.writable = Writable(database, blobs)
        self.wakeups = Wakeups()
        self.waits = Waits(self.wakeups, metrics.waiting)
        self.committer = Committer(self.changes, database.is_full, self._open_tasks)
        self.last_seen = LastSeen(database)
        self.federations: dict[str, Federation] = {}
        self.operators: dict[str, Operator] = {}
        self.retired: dict[str, int] = {}
        self.configs: dict[str, tuple[object, object, TaskConfig]] = {}
        self.streams: dict[str, list[tuple[str, Wait]]] = {}  # of events, by operator: of which federation, and each
        self.attempts: dict[str, tuple[tuple[int, int], Attempt]] = {}  # the latest at a secure sum, by federation
        self.keys: dict[str, tuple[tuple[int, int], dict[str, str]]] = {}  # of that attempt, with who has sent them
        self.epoch = ""  # another one each time the store is taken up: clients may have seen more than it holds
        self.ready = False
        self.leftovers = True
        self._closed = False
        self._reloading = False
        self._turn = threading.RLock()
        self._tensors = ThreadPoolExecutor(1, "tensors")
        self._computing: set[Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # Life

    async def open(self) -> None:
        """Take up all federations where they stood."""
        self._loop = asyncio.get_running_loop()
        self.database.on_away = lambda: self.wake([])
        await asyncio.to_thread(self._load)
        self.committer.open(self._loop)

    def stop_waiting(self) -> None:
        """Wake every long poll and stream for good. Call it on the event loop."""
        self.ready = False
        self.wakeups.close()

    def close(self) -> None:
        """Stop changing anything: the data folder is free for another coordinator."""
        self.committer.close()
        with contextlib.suppress(DatabaseAway):
            self.last_seen.flush()
        with self._turn:
            self._closed = True

    def _load(self) -> None:
        self.epoch = secrets.token_hex(8)
        with self.database.read() as session:
            self.federations = recovery.load_all(session, clock.monotonic())
            self.operators = {row.digest: operator_of(row) for row in session.scalars(select(OperatorRow))}
        for federation in self.federations.values():
            self._begin(federation)

    def _begin(self, federation: Federation) -> None:
        """Continue the run of a federation that was just read."""
        if federation.absent is not None:
            log.error("%s is left alone: %s", federation.name, federation.absent, extra=log_lines.where(federation))
        elif federation.run.state not in ENDED:
            now = clock.monotonic()
            with self.change(federation.id) as change:
                change.send(run_state.Restarted(now))

    @property
    def away(self) -> bool:
        """Whether the database is away, or what it holds is not taken up again yet."""
        return self.database.away is not None or self._reloading

    def come_back(self) -> None:
        """Take up the federations again once the database answers. Raises DatabaseAway, InUse, RegistryClosed."""
        with self._turn:
            if self._closed:
                raise RegistryClosed
            self._reloading = True
            self.database.come_back()
            # A commit whose answer was lost may have happened: what is in memory is not to be trusted.
            self._load()
            self._reloading = False
            self.leftovers = True
        log.info("the database is back")

    # Tensor work

    async def compute(self, job: Callable[[], T]) -> T:
        """Carry out ``job`` where all tensor work is done: one at a time, off the event loop."""
        future = self._tensors.submit(job)
        self._computing.add(future)
        future.add_done_callback(self._computing.discard)
        return await asyncio.wrap_future(future)

    async def stop_computing(self, seconds: float) -> None:
        """Begin no more tensor work, and wait a little for what is under way."""
        await asyncio.to_thread(wait_for_all, list(self._computing), seconds)
        self._tensors.shutdown(wait=False, cancel_futures=True)

    @property
    def computing(self) -> bool:
        """Whether tensor work is still under way after a stop: nobody waits for it any more."""
        return any(future.running() for future in list(self._computing))  # which its thread takes them out of

    # Changes

    def get(self, id: str) -> Federation:
        """The federation with this id. Raises NotFound, MethodAbsent."""
        federation = self.federations.get(id)
        if federation is None:
            raise NotFound("there is no such federation")
        if federation.absent is not None:
            why = f"{federation.name} is left alone: {federation.absent}"
            raise MethodAbsent(f"{why}; mend that, then start the coordinator again")
        return federation

    def find(self, id_or_name: str) -> Federation:
        """The federation with this id or name. Raises NotFound, MethodAbsent."""
        return self.get(self.find_any(id_or_name).id)

    def find_any(self, id_or_name: str) -> Federation:
        """The federation with this id or name, also if its method is absent. Raises NotFound."""
        federation = self.federations.get(id_or_name)
        if federation is None:
            federation = next((one for one in self.federations.values() if one.name == id_or_name), None)
        if federation is None:
            raise NotFound(f"there is no federation {id_or_name[:100]!r} here: check its name")
        return federation

    def _open_tasks(self, id: str) -> int:
        federation = self.federations.get(id)
        return len(federation.tasks) if federation is not None else 0

    @contextmanager
    def change(self, id: str) -> Iterator[Change]:
        """One transaction on one federation. What it leads to is seen by others only once it is on the disk."""
        with self.changes() as changes:
            yield changes.of(id)

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """One transaction on any number of federations."""
        with self._turn:
            if self._closed:
                raise RegistryClosed
            with self.database.write() as session:
                changes = Changes(session, self.get, self.noise)
                yield changes
                changes.write()
            before = self.federations
            for id, change in changes.by_id.items():
                self.metrics.observe(change, before[id].run)  # first: whoever sees what has changed finds it counted
            self.federations = before | {id: change.federation for id, change in changes.by_id.items()}
        changes.committed()
        if changes.batch.superseded:
            self.blobs.remove_superseded(changes.batch.superseded)
        self._announce(changes)

    def note(self, id: str, **fields: Any) -> None:
        """Set fields of a federation in memory alone: ``starting``, or ``tokens`` as just written."""
        with self._turn:
            federation = self.federations.get(id)
            if federation is not None:
                self.federations = {**self.federations, id: replace(federation, **fields)}

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """A block in which nothing else changes."""
        with self._turn:
            yield

    def add(self, federation: Federation) -> None:
        """Take up a federation that has just been created."""
        with self._turn:
            self.federations = {**self.federations, federation.id: federation}
        self.wake([])

    def forget(self, id: str) -> None:
        """Let go of a federation that has just been deleted."""
        with self._turn:
            gone = self.federations.get(id)
            self.configs.pop(id, None)
            self.attempts.pop(id, None)
            self.keys.pop(id, None)
            self.federations = {key: federation for key, federation in self.federations.items() if key != id}
        self.wake([(id, EVENTS), *((id, name) for name in (gone.clients if gone else ()))])

    def wake(self, keys: list[tuple[str, str]]) -> None:
        """Wake those who wait for ``keys``, and the driver."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.wakeups.wake, [*keys, "driver"])

    def _announce(self, changes: Changes) -> None:
        """Wake those whom the changes concern, then log them: nobody waits for a log."""
        keys: list[tuple[str, str]] = []
        for id, change in changes.by_id.items():
            names = change.federation.clients if change.everyone else change.wake
            keys += [(id, EVENTS), *((id, name) for name in names)]
        self.wake(keys)
        for change in changes.by_id.values():
            for kind, data in log_lines.together(change.emitted):
                log.info(kind, extra=log_lines.of_event(change.federation.name, data))
