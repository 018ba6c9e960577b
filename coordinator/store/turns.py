"""Turns: of several coordinators on one PostgreSQL database one works, and the others wait until it is gone.

The lock of the writing session (`database.PostgreSQL`) says who works: every commit goes over that session. A row says
whose session it is, and when its coordinator was seen last. So the next one can terminate the session of a coordinator
that has stopped, and that one knows by its own clock when it must answer nothing any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.store.backend import DatabaseAway, InUse, one_line
from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.form import expect_this_version
from promptfed.shared.machine import boot_time

log = logging.getLogger("promptfed.coordinator")

RENEW_SECONDS = 1.0
TRY_SECONDS = 0.5  # between two times that a waiting coordinator tries to take its turn
SILENT_SECONDS = 5.0  # after which the session of a coordinator that was not seen is terminated
TURN_SECONDS = 4.5  # after which it answers nothing any more: others' clocks may run faster
LOOK_SECONDS = 1.0  # between two looks at the object store
AWAY_SECONDS = 3.0  # for which the object store may not answer


class Turn:
    """One coordinator's turn: waited for, kept by a sign of life every second, and lost for good."""

    def __init__(self, database: Database, store_answers: Callable[[], bool] = lambda: True):
        """``store_answers``: whether the object store does; without it, the turn is neither taken nor kept."""
        self.database = database
        self._store_answers = store_answers
        self._renewed: float | None = None
        self._ended = threading.Event()
        self._warned = ""

    @property
    def works(self) -> bool:
        """Whether nobody else can have taken over: what this coordinator has in memory is what is stored."""
        renewed = self._renewed
        if self._ended.is_set() or renewed is None or self.database.away is not None:
            return False
        return boot_time() - renewed <= TURN_SECONDS

    def take(self, stopped: Callable[[], bool], upgrade_seconds: float = 0.0) -> bool:
        """Wait until nobody else works; False where ``stopped`` says so before.

        Raises:
            CannotOpen: another coordinator works on tables of another version, for ``upgrade_seconds`` by now.
        """
        begun = boot_time()
        while not (stopped() or self._ended.is_set()):
            try:
                if self._take(boot_time() - begun >= upgrade_seconds):
                    return True
            except (DatabaseAway, SQLAlchemyError) as error:
                self._warn(one_line(getattr(error, "orig", None) or error))
            self._ended.wait(TRY_SECONDS)
        return False

    def _take(self, expects_tables: bool) -> bool:
        if not self._store_answers():
            self._warn("the object store does not answer")
            return False
        before = boot_time()
        self.database.backend.terminate_silent(SILENT_SECONDS)
        try:
            self.database.come_back()
        except InUse as error:
            self._warn(str(error))
            if expects_tables:
                expect_this_version(self.database, or_none=True)
            return False
        self._renewed = before
        threading.Thread(target=self._renew_all, name="turn", daemon=True).start()
        return True

    def end(self) -> None:
        """Give the turn up. The database must be closed then, which frees the lock."""
        self._ended.set()

    def _renew_all(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            before = boot_time()
            if not self.works:
                self.end()  # Its time has run out: others may have had their turn since.
            elif not self._store_answers():
                self._warn("the object store does not answer: another coordinator takes over")
            else:
                try:
                    if not self.database.backend.renew():
                        self.end()
                    self._renewed = before
                    self._warned = ""
                except (SQLAlchemyError, DatabaseAway) as error:
                    self._warn(f"the sign of life could not be written: {type(error).__name__}")

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("waiting: %s" if self._renewed is None else "%s", text)
        self._warned = text


class ObjectsWatch:
    """Looks at an object store all the time, on a thread of its own: a look may hang."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._seen = float("-inf")
        self._ended = threading.Event()
        self._look()
        threading.Thread(target=self._look_all, name="objects", daemon=True).start()

    def answers(self) -> bool:
        """Whether it has answered a moment ago."""
        return boot_time() - self._seen < AWAY_SECONDS

    def end(self) -> None:
        """End the looks at the object store."""
        self._ended.set()

    def _look_all(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        before, answered = boot_time(), self.answers()
        try:
            self._bucket.probe(writes=False)
            self._seen = before
        except ObjectStoreAway as error:
            if answered:
                log.error("%s", error)
