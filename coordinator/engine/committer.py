"""Group commit: answers that arrive together are committed together, so that they wait for the disk once.

Whoever has an answer to a task enters it and waits. One thread takes what waits, lets each entry look again at how
things stand inside the transaction and step the round machine, commits once, and then tells all. What was told as
accepted is on the disk; a crash loses only entries that nobody was told of.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from promptfed.coordinator.engine.recorder import Change, Changes
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.fault_points import point

log = logging.getLogger("promptfed.coordinator")

MOST = 64  # entries of a group
GATHER_SECONDS = 0.001  # for which a group waits for more; meanwhile whoever else changes something has its turn

Outcome = bool | Exception
"""Whether the entry was new, or why it was refused or could not be written down."""


class Entry(Protocol):
    """What is to be written down of one answer."""

    @property
    def federation(self) -> str:
        """The id of the federation that it belongs to."""

    def enter(self, change: Change) -> bool:
        """Write it down; whether it is new. Raises Refusal before it has changed anything."""


class Stopped(Exception):
    """The registry has let go of its data folder: what is still computing must not write any more."""


@dataclass(frozen=True)
class _Waiting:
    """An entry, and where its outcome is waited for."""

    entry: Entry
    outcome: asyncio.Future[bool]


class Committer:
    """The one thread that commits answers."""

    def __init__(self, changes: Callable[[], AbstractContextManager[Changes]], is_full: Callable[[Exception], bool]):
        """``changes`` opens a transaction, ``is_full`` says whether an error means a full disk."""
        self._changes = changes
        self._is_full = is_full
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to commit what is submitted on ``loop``."""
        self._loop = loop
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    async def submit(self, entry: Entry) -> bool:
        """Commit ``entry``; whether it was new.

        Raises:
            Refusal: of the entry.
            DatabaseAway: it may have been committed all the same.
            SQLAlchemyError, OSError, Stopped: nothing of it is stored.
        """
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                raise Stopped
            self._waiting.put(_Waiting(entry, outcome))
        return await outcome

    def close(self) -> None:
        """Commit what waits, and nothing from then on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        open_ = True
        while open_:
            group, open_ = self._next()
            if group:
                self._tell(group, self._commit([waiting.entry for waiting in group]))

    def _next(self) -> tuple[list[_Waiting], bool]:
        """The next group, and whether more may follow."""
        first = self._waiting.get()
        if first is None:
            return [], False
        group = [first]
        time.sleep(GATHER_SECONDS)
        while len(group) < MOST:
            try:
                one = self._waiting.get_nowait()
            except Empty:
                break
            if one is None:
                return group, False
            group.append(one)
        return group, True

    def _commit(self, entries: Sequence[Entry]) -> list[Outcome]:
        """The outcome of each."""
        try:
            return self._together(entries)
        except Exception as error:
            if len(entries) == 1 or isinstance(error, DatabaseAway | Stopped) or self._is_full(error):
                return [error] * len(entries)
            log.warning("answers could not be committed together, each goes by itself: %s", type(error).__name__)
            # Nothing of it is stored. Whichever of them brought it about shall spoil no other.
            return [outcome for entry in entries for outcome in self._commit([entry])]

    def _together(self, entries: Sequence[Entry]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._changes() as changes:
            for entry in entries:
                try:
                    outcomes.append(entry.enter(changes.of(entry.federation)))
                except Refusal as refusal:
                    outcomes.append(refusal)
            point("group-stepped")
            changes.write()
            point("group-before-commit")
        point("group-committed")
        return outcomes

    def _tell(self, group: Sequence[_Waiting], outcomes: Sequence[Outcome]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_tell, group, outcomes)


def _tell(group: Sequence[_Waiting], outcomes: Sequence[Outcome]) -> None:
    for waiting, outcome in zip(group, outcomes, strict=True):
        if waiting.outcome.done():
            continue  # Who waited for it has gone.
        if isinstance(outcome, Exception):
            waiting.outcome.set_exception(outcome)
        else:
            waiting.outcome.set_result(outcome)
