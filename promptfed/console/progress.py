"""Progress of a federation for users: a bar over its rounds, and a table of accuracies.

Its metrics and accuracies are also written to TensorBoard or MLflow, round by round.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from promptfed.console.output import console, messages, points, table
from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import get_federation, reports_after
from promptfed.sdk.result import Accuracy, FederationReports, interval_of, margin_of
from promptfed.shared import get_extra
from promptfed.shared.api.api_schemas import FederationView
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.errors import BadInput, Failed
from promptfed.shared.messages import ENDED, Role
from promptfed.shared.plain_text import percent, plain, with_interval
from promptfed.shared.service.reasons import why

PACE_SECONDS = 3600  # rounds of the last hour estimate the time that is left
LABELS: dict[Role, str] = {"trainer": "accuracy", "evaluator": "unseen"}
POLL_SECONDS = 0.3
WIDE = 105  # columns of a terminal
INTERVALS = "[..]: 95 % interval. ±: half of the gain's, rather too wide, as both figures are of the same images."
EXPERIMENT = "promptfed"
NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")  # characters that MLflow forbids in metric names
Write = Callable[[FederationView, RoundReport], None]


def loss_of(report: RoundReport) -> float | None:
    """The training loss of the last phase that reports one."""
    return next((phase.metrics["loss"] for phase in reversed(report.phases) if "loss" in phase.metrics), None)


def means_of(report: RoundReport, role: Role) -> dict[str, float]:
    """The means of a role's clients on their own test images, by name; empty if none was sent."""
    return report.evaluation.mean.get(role, {}) if report.evaluation is not None else {}


def describe_round(report: RoundReport) -> str:
    """``round 3: loss 0.412, accuracy 61.2 % (zero-shot 33.4 %), unseen 40.0 %, 1.8 s``."""
    loss = loss_of(report)
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    for role, label in LABELS.items():
        mean = means_of(report, role)
        if "accuracy" in mean:
            template = f" (zero-shot {percent(mean['zero_shot'])})" if "zero_shot" in mean else ""
            parts.append(f"{label} {percent(mean['accuracy'])}{template}")
    if report.seconds is not None:
        parts.append(f"{report.seconds:.1f} s")
    return f"round {report.round}: {', '.join(parts) or 'over'}"


@dataclass(frozen=True)
class Snapshot:
    """A federation at one moment; ``ended``: its last round that is over in words, where whoever follows it says so."""

    state: str
    reason: str | None
    round: int
    rounds: int
    phase: str | None
    answered: tuple[str, ...]
    awaited: tuple[str, ...]
    ended: str | None = None

    @classmethod
    def of(cls, federation: FederationView) -> Snapshot:
        """The parts of a federation that are shown while it runs."""
        return cls(
            state=federation.state,
            reason=federation.reason,
            round=federation.round,
            rounds=federation.spec.rounds,
            phase=federation.phase,
            answered=tuple(federation.answered),
            awaited=tuple(awaited.name for awaited in federation.awaited),
        )

    @property
    def over(self) -> bool:
        """Whether it has ended or waits for an operator."""
        return self.state in ENDED or (self.state == "paused" and self.reason is not None)

    def describe(self) -> str:
        """One line for people."""
        if self.state != "running":
            return f"{self.state}{f' ({self.reason})' if self.reason else ''}"
        waiting = f", waiting for {', '.join(self.awaited[:4])}" if self.awaited else ""
        return f"{self.phase or 'between phases'}: {len(self.answered)} answered{waiting}"


def why_this_round(federation: FederationView) -> list[str]:
    """Which round is the best, with selection, and why a finished federation has fewer rounds than its spec."""
    best, lines = federation.selection, []
    if best is not None:
        mean = f"a mean {best.metric.replace('_', '-')} of {best.value:.1%} on held-out training images"
        lines.append(f"round {best.round} is the best of {best.compared}, with {mean}")
    return lines if federation.ended_early is None else [*lines, federation.ended_early]


def follow(
    api: Coordinator, federation: str, between: Callable[[], object] = lambda: None, poll: float = POLL_SECONDS
) -> Iterator[Snapshot]:
    """Yield a snapshot at every change until `Snapshot.over`; ``between`` is called between two requests."""
    last = None
    while True:
        snapshot = Snapshot.of(api.send(get_federation(federation)).view)
        if snapshot != last:
            yield snapshot
            last = snapshot
        if snapshot.over:
            return
        between()
        time.sleep(poll)


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
        self._progress = Progress(
            *columns,
            console=messages,
            disable=quiet,
            transient=True,
            get_time=clock,
            speed_estimate_period=PACE_SECONDS,
        )
        self._task = self._progress.add_task("", total=rounds)
        self._quiet = quiet
        self._plain = not quiet and not messages.is_terminal
        self._last: tuple[str, int, str | None] | None = None
        self._said = ""

    def __enter__(self) -> Watcher:
        if not self._plain:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Replace the current line; without a terminal, print another line."""
        self._progress.update(self._task, description=escape(plain(text)))
        if self._plain and text not in ("", self._said):
            messages.print(escape(plain(text)), highlight=False, soft_wrap=True)
        self._said = text

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            messages.print(escape(plain(text)), highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show the state of the federation, followed by the remaining time."""
        done = snapshot.rounds if snapshot.state == "finished" else max(0, snapshot.round - 1)
        self._progress.update(self._task, completed=done, total=snapshot.rounds)
        key = (snapshot.state, snapshot.round, snapshot.phase)
        # A log file gets one line for each phase, not for each answer.
        if not self._plain or key != self._last or snapshot.ended:
            left = self._progress.tasks[0].time_remaining or 0.0
            words = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
            remaining = f"; about {words} left" if left else ""
            running = snapshot.state == "running"
            if snapshot.ended is not None:  # a log gets a line for each round, which says what came of it
                self.say(snapshot.ended if self._plain or not snapshot.ended else snapshot.ended + remaining)
                return
            self.say(f"round {snapshot.round}, {snapshot.describe()}{remaining}" if running else snapshot.describe())
        self._last = key


def result_table(accuracies: Sequence[Accuracy], title: str) -> Table:
    """Zero-shot and federated accuracy of each client, and the means over trainers and over unseen domains.

    Behind a figure is its 95 % interval, where each image has one label and counts are exact.
    """
    rows = []
    for role, label in (("trainer", "clients"), ("evaluator", "unseen")):
        members = [row for row in accuracies if row.role == role and row.split == "test"]
        for row in members:
            name = row.client if role == "trainer" else f"unseen: {row.domain or row.client}"
            rows.append([name, row.domain or "-", *_cells(row.zero_shot, [row]), _pair(beside(row))])
        if len(members) > 1:
            template = [row.zero_shot for row in members if row.zero_shot is not None]
            means = [_mean(values) for values in zip(*map(beside, members), strict=True)]
            cells = _cells(fmean(template) if template else None, members)
            rows.append([f"mean of {label}", "", *cells, _pair(means)])
    has_majority = any(row.majority is not None for row in accuracies)
    columns = ["client", "domain", "zero-shot", "federated", "gain", "AUROC, most"]
    return measured(
        title, columns if has_majority else columns[:5], rows if has_majority else [row[:5] for row in rows], accuracies
    )


def measured(title: str, columns: list[str], rows: list[list[str]], accuracies: Sequence[Accuracy]) -> Table:
    """A table of ``accuracies`` with a legend of their intervals, which stand below them in a narrow terminal."""
    if console.width < WIDE:
        rows = [[*row[:2], *(re.sub(r" (?=[\[±])", "\n", cell) for cell in row[2:])] for row in rows]
    shown = table(title, columns, rows)
    if any(row.low is not None for row in accuracies):
        shown.caption, shown.caption_justify = INTERVALS, "left"
    return shown


def beside(row: Accuracy) -> tuple[float | None, float | None]:
    """What an accuracy is read with: the AUROC and the most frequent class's share."""
    return row.auroc, row.majority


def _pair(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{100 * value:.1f}" for value in values)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _cells(zero_shot: float | None, members: Sequence[Accuracy]) -> list[str]:
    federated = fmean(row.accuracy for row in members)
    cells = [percent(zero_shot), with_interval(federated, interval_of(members))]
    return [*cells, points(zero_shot, federated, margin_of(members))]


@contextmanager
def _tensorboard(folder: str) -> Iterator[Write]:
    """Event files, in a subfolder of ``folder`` for each federation."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write into {folder}: {why(error)}") from None

    @cache
    def events(name: str) -> Any:
        return SummaryWriter(f"{folder}/{name}", purge_step=0)

    def write(federation: FederationView, report: RoundReport) -> None:
        writer = events(f"{federation.name}-{federation.id}")
        for name, value in metrics_of(report).items():
            writer.add_scalar(name, value, report.round)
        writer.flush()

    yield write


@contextmanager
def _mlflow(uri: str) -> Iterator[Write]:
    """A run of the experiment ``promptfed`` at the tracking server or database ``uri``."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    runs: list[str] = []
    try:
        client = MlflowClient(tracking_uri=uri)
        stored = client.get_experiment_by_name(EXPERIMENT)
        experiment = stored.experiment_id if stored is not None else client.create_experiment(EXPERIMENT)

        def write(federation: FederationView, report: RoundReport) -> None:
            if not runs:
                runs.append(client.create_run(experiment, run_name=federation.name).info.run_id)
            for name, value in metrics_of(report).items():
                client.log_metric(runs[0], NOT_IN_MLFLOW.sub(":", name), value, step=report.round)

        yield write
        for run in runs:
            client.set_terminated(run)
    except MlflowException as error:
        raise Failed(f"MLflow: {' '.join(str(error).split())[:300]}") from None


TRACKERS: dict[str, Callable[[str], AbstractContextManager[Write]]] = {"tensorboard": _tensorboard, "mlflow": _mlflow}


@contextmanager
def open_tracker(where: str) -> Iterator[Write]:
    """A function that writes a round of a federation to ``tensorboard:FOLDER`` or ``mlflow:URI``.

    Raises:
        PromptfedError: the tracker does not exist, its library is not installed, or it refuses.
    """
    kind, _, place = where.partition(":")
    if kind not in TRACKERS or not place:
        raise BadInput(f"{where!r} is not a tracker: write tensorboard:FOLDER or mlflow:URI")
    with ExitStack() as stack:
        try:
            write = stack.enter_context(TRACKERS[kind](place))
        except ImportError:
            raise BadInput(f"{kind} is not installed: {get_extra(kind)}") from None
        yield write


def record(write: Write, result: FederationReports) -> None:
    """Write all rounds of a result."""
    for report in result.round_reports:
        write(result.federation, report)


def track(
    api: Coordinator, federation: str, trackers: Sequence[Write], progress: Callable[[Snapshot, int], None]
) -> Snapshot:
    """Follow a federation and write each finished round; ``progress`` receives changes and the last written round."""
    view, last = api.send(get_federation(federation)).view, -1
    for snapshot in follow(api, federation):
        for report in api.run(reports_after(federation, last)):
            if snapshot.state in ENDED or report.ended_at is not None:
                for write in trackers:
                    write(view, report)
                last = report.round
        progress(snapshot, last)
    return snapshot


def metrics_of(report: RoundReport) -> dict[str, float]:
    """The numbers of a round: ``loss/PHASE``, ``accuracy/ROLE/SPLIT`` and the accuracies of each client."""
    metrics: dict[str, float] = {}
    for phase in report.phases:
        metrics |= {f"{name}/{phase.phase}": value for name, value in (phase.metrics | phase.measured.phase).items()}
    if report.evaluation is not None:
        for role, splits in report.evaluation.by_split.items():
            for split, means in splits.items():
                metrics |= {f"{name}/{role}/{split}": value for name, value in means.items()}
        for client, measured in report.evaluation.clients.items():
            for name, own in measured.splits.items():
                metrics[f"accuracy/client {client}/{name}"] = own.accuracy
    return metrics
