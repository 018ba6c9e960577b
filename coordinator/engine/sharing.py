"""Several coordinators on one database: who carries out which federation.

One thread says every second that this coordinator is there and looks at all leases. A second one takes leases, many at
once: what is free is the first one's that sees it. Others read federations into memory, running ones first; those of
which nothing is due are read when somebody asks for them. One thread looks at the object store: without it a
coordinator does not say that it is there, and the others take its federations.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.engine.audit import operator_of
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway
from promptfed.coordinator.store.database import DatabaseAway
from promptfed.coordinator.store.leases import RENEW_SECONDS, LeaseLook, Leases
from promptfed.coordinator.store.tables import DELETING, FederationRow, OperatorRow
from promptfed.shared.messages import ENDED

log = logging.getLogger("promptfed.coordinator")

READERS = 4  # threads that read federations into memory
LOOK_SECONDS = 1.0  # between two looks at the object store
AWAY_SECONDS = 3.0  # for which the object store may not answer
FAILURES = (SQLAlchemyError, DatabaseAway, Refusal, RegistryClosed)


class Sharing:
    """Keeps the leases of one registry, and has it take up and let go of federations."""

    def __init__(self, registry: Registry, leases: Leases, bucket: Bucket | None):
        self._registry = registry
        self._leases = leases
        self._bucket = bucket
        self._objects_seen = time.monotonic()
        self._ended = threading.Event()
        self._wanted: list[str] = []
        self._work = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, "sharing")
        self._warned = ""
        loops: list[Callable[[], None]] = [self._renew_all, self._take_all]
        if bucket is not None:
            loops.append(self._look_at_objects)
        self._threads = [threading.Thread(target=loop, name=f"sharing{loop.__name__}", daemon=True) for loop in loops]

    async def start(self) -> None:
        """Register, and take what nobody runs. Raises SQLAlchemyError."""
        await asyncio.to_thread(self._leases.register)
        self._plan(await asyncio.to_thread(self._renew))
        await asyncio.to_thread(self._take, self._wanted)
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Release all leases. The registry must not change anything any more."""
        self._ended.set()
        self._work.set()
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._readers.shutdown, cancel_futures=True)
        try:
            await asyncio.to_thread(self._leases.release)
        except SQLAlchemyError as error:
            log.warning("the leases are not given back, others wait for them: %s", type(error).__name__)
        self._leases.close()

    # Every second

    def renew(self) -> None:
        """Once: say that this one is there, let go of what was lost, and have taken up what is free."""
        if self._bucket is not None and time.monotonic() - self._objects_seen > AWAY_SECONDS:
            self._warn("the object store does not answer: other coordinators take over")
            return
        try:
            self._plan(self._renew())
        except (SQLAlchemyError, DatabaseAway) as error:
            self._warn(f"the leases could not be renewed: {type(error).__name__}")
            return
        self._warned = ""

    def _renew(self) -> LeaseLook:
        """Renew the leases and let go of what was lost."""
        with self._leases.renew() as look:
            with self._registry.database.read() as session:
                rows = session.scalars(select(OperatorRow)).all()
            self._registry.operators = {row.digest: operator_of(row) for row in rows}
            for id in look.lost:
                self._registry.lose(id)
        return look

    def _renew_all(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            self.renew()

    def _plan(self, look: LeaseLook) -> None:
        self._wanted = look.free
        if self._wanted:
            self._work.set()

    # Taking over

    def _take_all(self) -> None:
        while not self._ended.is_set():
            self._work.wait()
            self._work.clear()
            self._take(self._wanted)

    def _take(self, ids: Sequence[str]) -> None:
        """Take leases, and have read what is due."""
        wanted = [id for id in ids if id not in self._leases.held]
        if not wanted or self._ended.is_set() or self._registry.database.away is not None:
            return
        taken: list[str] = []
        try:
            taken = self._leases.take(wanted)
            due = self._due(taken)
        except FAILURES as error:
            self._give_up(taken, error)
            return
        for id in due:
            self._readers.submit(self._read, id)
        if taken:
            log.info("%d federations are taken over, %d of them to go on with", len(taken), len(due))

    def _due(self, ids: Sequence[str]) -> list[str]:
        """The federations that have to be in memory since something may be due, running ones first."""
        spec = FederationRow.spec
        query = select(FederationRow.id, FederationRow.state, spec["start"].as_string(), spec["retention"].as_string())
        with self._registry.database.read() as session:
            rows = session.execute(query.where(FederationRow.id.in_(ids))).all() if ids else []
        running = [id for id, state, _, _ in rows if state == "running"]
        return running + [
            id
            for id, state, start, retention in rows
            if state in ("paused", DELETING)
            or (state == "enrolling" and start == "when_ready")
            or (state in ENDED and retention == "last_round")  # what it did not keep may still be there
        ]

    def _read(self, id: str) -> None:
        if self._ended.is_set() or self._registry.database.away is not None:
            return
        try:
            self._registry.take_up(id)
        except Exception as error:  # a method's own code may raise anything
            self._give_up([id], error)

    def _give_up(self, ids: Iterable[str], error: Exception) -> None:
        for id in ids:
            self._leases.let_go(id)  # and try again: it is free for this one
        self._warn(f"federations could not be taken up: {type(error).__name__}: {error}"[:500])

    # The object store

    def _look_at_objects(self) -> None:
        assert self._bucket is not None
        told = False
        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._bucket.probe(writes=False)
                self._objects_seen, told = time.monotonic(), False
            except ObjectStoreAway as error:
                if not told:  # once an outage
                    log.error("%s", error)
                told = True

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text
