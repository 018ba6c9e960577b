"""Several coordinators on one database: one thread says that this one is there, another takes federations up."""

from __future__ import annotations

import asyncio
import logging
import threading

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.engine.registry import Registry, operator_of
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.leases import RENEW_SECONDS, Leases
from promptfed.coordinator.store.tables import OperatorRow

log = logging.getLogger("promptfed.coordinator")


class Sharing:
    """Keeps the leases of one registry, and has it take up and let go of federations."""

    def __init__(self, registry: Registry, leases: Leases):
        self._registry = registry
        self._leases = leases
        self._ended = threading.Event()
        self._wanted: list[str] = []
        self._work = threading.Event()
        self._warned = ""
        self._threads = [
            threading.Thread(target=self._renew_all, name="leases", daemon=True),
            threading.Thread(target=self._take_all, name="takeover", daemon=True),
        ]

    async def start(self) -> None:
        """Register, and take up federations that nobody runs. Raises SQLAlchemyError."""
        await asyncio.to_thread(self._leases.register)
        await asyncio.to_thread(self._take, await asyncio.to_thread(self._renew))
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Release all leases. The registry must not change anything any more."""
        self._ended.set()
        self._work.set()
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join)
        try:
            await asyncio.to_thread(self._leases.release)
        except SQLAlchemyError as error:
            log.warning("the leases are not given back, others wait for them: %s", type(error).__name__)
        self._leases.close()

    def renew(self) -> None:
        """Once: say that this one is there, let go of what was lost, and have taken up what is free."""
        try:
            free = self._renew()
        except (SQLAlchemyError, DatabaseAway) as error:
            self._warn(f"the leases could not be renewed: {type(error).__name__}")
            return
        if free:
            self._wanted = free
            self._work.set()
        self._warned = ""

    def _renew(self) -> list[str]:
        """Renew the leases and let go of what was lost; what is free."""
        with self._leases.renew() as look:
            with self._registry.database.read() as session:
                rows = session.scalars(select(OperatorRow)).all()
            self._registry.operators = {row.digest: operator_of(row) for row in rows}
            for id in look.lost:
                self._registry.lose(id)
        return look.free

    def _renew_all(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            self.renew()

    def _take_all(self) -> None:
        while not self._ended.is_set():
            self._work.wait()
            self._work.clear()
            self._take(self._wanted)

    def _take(self, ids: list[str]) -> None:
        for id in ids:
            if self._ended.is_set() or self._registry.database.away is not None:
                return
            try:
                if id in self._leases.held or self._leases.take(id):
                    self._registry.take_up(id)
            except (SQLAlchemyError, DatabaseAway, Refusal, RegistryClosed) as error:
                self._leases.let_go(id)  # and try again: it is free for this one
                self._warn(f"a federation could not be taken up: {type(error).__name__}: {error}"[:500])

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text
