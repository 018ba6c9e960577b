"""Following a federation over the API: what happens now, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from promptfed.sdk.client import Coordinator
from promptfed.sdk.output import messages, percent, table

ENDED = ("finished", "failed", "cancelled")
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment."""

    state: str
    reason: str | None
    round: int
    rounds: int
    phase: str | None
    answered: tuple[str, ...]
    awaited: tuple[str, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Snapshot:
        """From what ``GET /v1/federations/{id}`` answers."""
        return cls(
            state=found["state"],
            reason=found["reason"],
            round=found["round"],
            rounds=found["spec"]["rounds"],
            phase=found["phase"],
            answered=tuple(found["answered"]),
            awaited=tuple(one["name"] for one in found["awaited"]),
        )

    @property
    def over(self) -> bool:
        """Whether it has ended, or stands still until an operator does something."""
        return self.state in ENDED or (self.state == "paused" and self.reason == "quorum_missed")

    def describe(self) -> str:
        """One line for people."""
        if self.state != "running":
            return f"{self.state}{f' ({self.reason})' if self.reason else ''}"
        waiting = f", waiting for {', '.join(self.awaited[:4])}" if self.awaited else ""
        return f"{self.phase or 'between phases'}: {len(self.answered)} answered{waiting}"


def follow(
    api: Coordinator, federation: str, between: Callable[[], object] = lambda: None, poll: float = POLL_SECONDS
) -> Iterator[Snapshot]:
    """Snapshots at every change until nothing more will happen by itself; ``between`` runs between two looks."""
    last = None
    while True:
        snapshot = Snapshot.of(api.get(f"/v1/federations/{federation}"))
        if snapshot != last:
            yield snapshot
            last = snapshot
        if snapshot.over:
            return
        between()
        time.sleep(poll)


class Watcher:
    """Live progress on stderr: a bar over the rounds and one line of what happens now."""

    def __init__(self, rounds: int | None = None, *, quiet: bool = False):
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

    def __enter__(self) -> Watcher:
        if not self._plain:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Show one line instead of the last one; where no terminal is watching, as a line of its own."""
        self._progress.update(self._task, description=escape(text))
        if self._plain and text != self._said:
            messages.print(escape(text), highlight=False, soft_wrap=True)
        self._said = text

    def note(self, text: str) -> None:
        """Show one line that stays."""
        if not self._quiet:
            messages.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show where the federation stands."""
        done = snapshot.rounds if snapshot.state == "finished" else max(0, snapshot.round - 1)
        self._progress.update(self._task, completed=done, total=snapshot.rounds)
        key = (snapshot.state, snapshot.round, snapshot.phase)
        if not self._plain or key != self._last:  # a log gets a line for each phase, not for each answer
            where = f"round {snapshot.round}, " if snapshot.state == "running" else ""
            self.say(where + snapshot.describe())
        self._last = key


@dataclass(frozen=True)
class Row:
    """One client's accuracies on its test images: the template's and the federation's."""

    client: str
    role: str
    domain: str | None
    zero_shot: float | None
    federated: float


@dataclass(frozen=True)
class Result:
    """What a federation came to after ``round``, and the bytes of all payloads (down) and updates (up) so far."""

    round: int
    rows: tuple[Row, ...]
    bytes_up: int
    bytes_down: int

    def mean(self, role: str, column: Literal["zero_shot", "federated"]) -> float | None:
        """Mean accuracy over the clients of ``role``; None where there is none."""
        found = [value for row in self.rows if row.role == role and (value := getattr(row, column)) is not None]
        return sum(found) / len(found) if found else None


def pages(api: Coordinator, path: str, key: str, after: str | None = None) -> Iterator[dict[str, Any]]:
    """Everything on the pages of a list, or what comes behind ``after``."""
    while True:
        page = api.get(path, **({"after": after} if after is not None else {}))
        yield from page[key]
        after = page["next"]
        if after is None:
            return


def read_result(api: Coordinator, federation: str) -> Result | None:
    """What the last evaluation found; None where there was none yet."""
    reports = list(pages(api, f"/v1/federations/{federation}/rounds", "rounds"))
    evaluated = [report for report in reports if report["evaluation"] and report["evaluation"]["clients"]]
    if not evaluated:
        return None
    rows = [
        Row(name, found["role"], found["domain"], _accuracy(found["zero_shot"], split), result["accuracy"])
        for name, found in evaluated[-1]["evaluation"]["clients"].items()
        for split, result in found["splits"].items()
        if split == "test"
    ]
    rows.sort(key=lambda row: (row.role != "trainer", row.client))
    up, down = (sum(report[key] for report in reports) for key in ("bytes_up", "bytes_down"))
    return Result(evaluated[-1]["round"], tuple(rows), up, down)


def _accuracy(splits: dict[str, Any], name: str) -> float | None:
    return splits[name]["accuracy"] if name in splits else None


def result_table(result: Result, title: str) -> Table:
    """Zero-shot against federated, for each client and in the mean, for trainers and for unseen domains."""
    rows = []
    for role, label in (("trainer", "clients"), ("evaluator", "unseen")):
        members = [row for row in result.rows if row.role == role]
        for row in members:
            name = row.client if role == "trainer" else f"unseen: {row.domain or row.client}"
            rows.append(
                [
                    name,
                    row.domain or "-",
                    percent(row.zero_shot),
                    percent(row.federated),
                    _gain(row.zero_shot, row.federated),
                ]
            )
        if len(members) > 1:
            zero_shot, federated = result.mean(role, "zero_shot"), result.mean(role, "federated")
            rows.append([f"mean of {label}", "", percent(zero_shot), percent(federated), _gain(zero_shot, federated)])
    return table(title, ["client", "domain", "zero-shot", "federated", "gain"], rows)


def _gain(zero_shot: float | None, federated: float | None) -> str:
    if zero_shot is None or federated is None:
        return "-"
    return f"{100 * (federated - zero_shot):+.1f}"
