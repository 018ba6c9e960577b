"""Progress of a federation for users: a bar over its rounds, and a table of accuracies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from promptfed.sdk.follow import Snapshot
from promptfed.sdk.output import messages, table
from promptfed.sdk.pace import Pace, duration
from promptfed.sdk.result import Accuracy
from promptfed.sdk.text import percent
from promptfed.shared.plain_text import plain


class Watcher:
    """Live progress on stderr: a bar over the rounds, and one line about the current step; ``clock`` gives seconds."""

    def __init__(self, rounds: int | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic):
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=messages, disable=quiet, transient=True)
        self._task = self._progress.add_task("", total=rounds)
        self._quiet = quiet
        self._plain = not quiet and not messages.is_terminal
        self._last: tuple[str, int, str | None] | None = None
        self._said = ""
        self._clock = clock
        self._pace: Pace | None = None
        self._open = 0, 0.0  # the round that runs, and when it began

    def __enter__(self) -> Watcher:
        if not self._plain:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Replace the current line; without a terminal, print another line."""
        self._progress.update(self._task, description=escape(plain(text)))
        if self._plain and text != self._said:
            messages.print(escape(plain(text)), highlight=False, soft_wrap=True)
        self._said = text

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            messages.print(escape(plain(text)), highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot, remark: str = "") -> None:
        """Show the state of the federation, followed by ``remark``, by default the remaining time."""
        remark = remark or self._left(snapshot)
        done = snapshot.rounds if snapshot.state == "finished" else max(0, snapshot.round - 1)
        self._progress.update(self._task, completed=done, total=snapshot.rounds)
        key = (snapshot.state, snapshot.round, snapshot.phase)
        if not self._plain or key != self._last:  # a log file gets one line for each phase, not for each answer
            where = f"round {snapshot.round}, " if snapshot.state == "running" else ""
            self.say(where + snapshot.describe() + (f"; {remark}" if remark else ""))
        self._last = key

    def _left(self, snapshot: Snapshot) -> str:
        if snapshot.state != "running" or snapshot.round < 1:
            return ""
        now = self._clock()
        if self._pace is None:
            self._pace, self._open = Pace(snapshot.rounds, self._clock), (snapshot.round, now)
        first, begun = self._open
        for passed in range(first, snapshot.round):  # several where rounds are quicker than looks
            self._pace.count(passed, (now - begun) / (snapshot.round - first))
            self._open = snapshot.round, now
        left = self._pace.left()
        return f"about {duration(left)} left" if left is not None else ""


def result_table(accuracies: Sequence[Accuracy], title: str) -> Table:
    """Zero-shot and federated accuracy of each client, and the means over trainers and over unseen domains."""
    rows = []
    for role, label in (("trainer", "clients"), ("evaluator", "unseen")):
        members = [row for row in accuracies if row.role == role and row.split == "test"]
        for row in members:
            name = row.client if role == "trainer" else f"unseen: {row.domain or row.client}"
            rows.append([name, row.domain or "-", *_cells(row.zero_shot, row.accuracy)])
        if len(members) > 1:
            template = [row.zero_shot for row in members if row.zero_shot is not None]
            adapted = fmean(row.accuracy for row in members)
            rows.append([f"mean of {label}", "", *_cells(fmean(template) if template else None, adapted)])
    return table(title, ["client", "domain", "zero-shot", "federated", "gain"], rows)


def _cells(zero_shot: float | None, federated: float) -> list[str]:
    gain = "-" if zero_shot is None else f"{100 * (federated - zero_shot):+.1f}"
    return [percent(zero_shot), percent(federated), gain]
