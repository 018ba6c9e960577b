"""Group commit: answers that arrive together share one transaction, and so one wait for the disk.

Requests submit their entries and wait. The event loop gathers a group. One thread opens a transaction, lets each entry
check the current state and step the round machine, commits once, and reports the outcomes. An accepted answer is on
the disk; a crash loses only answers that were not confirmed.

A group waits for more entries while other answers are arriving. It is committed at once if it is a single entry, or
if it answers all open tasks of its federation. Entries that arrive during a commit form the next group.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from promptfed.coordinator.engine.recorder import Change, Changes
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.shared.service.fault_points import point

log = logging.getLogger("promptfed.coordinator")

MOST = 64  # entries of a group
QUIET_SECONDS = 0.001  # in which no client has asked for anything: then a group waits for no more
LATELY = 20  # times that: who asked for something then may be about to answer
MOST_SECONDS = 0.005  # that a group waits for more, however many still come: about as long as the disk takes for one

Outcome = bool | Exception
"""Whether the entry was new, or why it was refused or could not be written down."""


class Submission(Protocol):
    """One answer that is to be stored."""

    @property
    def federation(self) -> str:
        """The id of its federation."""

    @property
    def task_id(self) -> str | None:
        """The id of the task that it answers; None if it answers none."""

    def enter(self, change: Change) -> bool:
        """Store it; returns whether it is new. Raises Refusal before changing anything."""


class RegistryClosed(Exception):
    """The registry is closed: unfinished computations must not write any more."""


@dataclass(frozen=True)
class _Waiting:
    """An entry and the future of its outcome."""

    entry: Submission
    outcome: asyncio.Future[bool]


class Committer:
    """The thread that commits answers. Call all methods but ``close`` on the event loop."""

    def __init__(
        self,
        changes: Callable[[], AbstractContextManager[Changes]],
        is_full: Callable[[Exception], bool],
        open_tasks: Callable[[str], int] = lambda federation: 0,
    ):
        """``changes`` opens a transaction, ``is_full`` says whether an error means a full disk.

        ``open_tasks``: the number of a federation's open tasks.
        """
        self._changes = changes
        self._is_full = is_full
        self._open_tasks = open_tasks
        self._groups: SimpleQueue[list[_Waiting] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # about what follows, which ``close`` looks at too
        self._gathered: list[_Waiting] = []
        self._closed = False
        self._since = 0.0  # when the first of the gathered ones came
        self._timer: asyncio.TimerHandle | None = None
        self._committing = False
        self._coming = 0  # answers that are being received, entered, or committed
        self._entered = 0  # of these, the ones that are entered
        self._asked = self._asked_before = 0.0  # when a client asked for something last, and when before

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start committing entries that are submitted on ``loop``."""
        self._loop = loop
        self._asked = self._asked_before = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Note a client's request: answers of others may follow."""
        # Not the loop's time, which stands still while the loop works off what has arrived together.
        self._asked_before, self._asked = self._asked, time.monotonic()

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A block in which an answer is received, and submitted unless it is refused."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    async def submit(self, entry: Submission) -> bool:
        """Commit ``entry``; whether it was new.

        Raises:
            Refusal: of the entry.
            DatabaseAway: it may have been committed all the same.
            SQLAlchemyError, OSError, RegistryClosed: nothing of it is stored.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(entry, loop.create_future())
        with self._lock:
            if self._closed:
                raise RegistryClosed
            if not self._gathered:
                self._since = time.monotonic()
            self._gathered.append(waiting)
        self._entered += 1
        try:
            self._go_on(loop)
            return await waiting.outcome
        finally:
            self._entered -= 1

    def close(self) -> None:
        """Commit the waiting entries, and refuse later ones."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._gathered:
                self._put()
            self._groups.put(None)
        if self._thread is not None:
            self._thread.join()

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit the gathered entries now, or after waiting for more."""
        if self._committing or not self._gathered:
            return
        now = time.monotonic()
        left = min(QUIET_SECONDS, self._since + MOST_SECONDS - now)
        if len(self._gathered) < MOST and left > 0 and not self._answers_all() and not self._is_quiet(now):
            if self._timer is None:
                self._timer = loop.call_later(left, self._look_again, loop)
            return
        if self._timer is not None:
            self._timer.cancel()  # It was this group's: the next one has a time of its own.
            self._timer = None
        with self._lock:
            if not self._closed:
                self._committing = True
                self._put()

    def _answers_all(self) -> bool:
        """Whether the gathered entries answer all open tasks of a federation: it waits for no other answer."""
        awaited = self._open_tasks(self._gathered[0].entry.federation)
        if not 0 < awaited <= len(self._gathered):
            return False
        return len({waiting.entry.task_id for waiting in self._gathered} - {None}) >= awaited

    def _is_quiet(self, now: float) -> bool:
        """Whether no other answer is arriving or seems likely to arrive soon."""
        if self._coming > self._entered:
            return False
        if now - self._since >= QUIET_SECONDS:
            return now - self._asked > QUIET_SECONDS
        # It has asked for something itself: what counts is whether others have shortly before.
        return len(self._gathered) == 1 and now - self._asked_before > LATELY * QUIET_SECONDS

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._go_on(loop)

    def _put(self) -> None:
        self._groups.put(self._gathered[:MOST])
        self._gathered = self._gathered[MOST:]

    def _work(self) -> None:
        while (group := self._groups.get()) is not None:
            self._commit(group)
            self._call(self._done)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _done(self) -> None:
        self._committing = False
        if self._loop is not None:
            self._go_on(self._loop)

    def _tell(self, group: Sequence[_Waiting], outcomes: Sequence[Outcome]) -> None:
        for waiting, outcome in zip(group, outcomes, strict=True):
            if waiting.outcome.done():
                continue  # Who waited for it has gone.
            if isinstance(outcome, Exception):
                waiting.outcome.set_exception(outcome)
            else:
                waiting.outcome.set_result(outcome)

    def _commit(self, group: Sequence[_Waiting]) -> None:
        """Commit a group, and tell each its outcome."""
        try:
            self._together(group)
        except Exception as error:
            if len(group) == 1 or isinstance(error, DatabaseAway | RegistryClosed) or self._is_full(error):
                self._call(self._tell, group, [error] * len(group))
                return
            log.warning("answers could not be committed together, each goes by itself: %s", type(error).__name__)
            # Nothing of it is stored. Whichever of them brought it about shall spoil no other.
            for waiting in group:
                self._commit([waiting])

    def _together(self, group: Sequence[_Waiting]) -> None:
        outcomes: list[Outcome] = []

        def tell() -> None:
            point("group-committed")
            self._call(self._tell, group, outcomes)

        with self._changes() as changes:
            changes.committed = tell
            for entry in (waiting.entry for waiting in group):
                try:
                    outcomes.append(entry.enter(changes.of(entry.federation)))
                except Refusal as refusal:
                    outcomes.append(refusal)
            point("group-stepped")
            changes.write()
            point("group-before-commit")
