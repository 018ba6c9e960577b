"""Experiment trackers: the metrics of a federation's reports go to TensorBoard or MLflow.

Each tracker is one class that implements `Tracker` and imports its library on first use (the extras
``promptfed[tensorboard]`` and ``promptfed[mlflow]``). All numbers come from the coordinator's reports, so running and
finished federations can be tracked.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.follow import Snapshot, follow
from promptfed.sdk.operations import get_federation, get_rounds
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.api_schemas import FederationView
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.messages import ENDED
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import FederationSpec

FEDERATION_TAG, ROUND_TAG = "promptfed.federation", "promptfed.round"
EXPERIMENT = "promptfed"
NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")  # characters that MLflow forbids in metric names


class Tracker(ABC):
    """A destination for metrics, with one run for each federation and one step for each round.

    A tracker is closed at the end of its ``with`` block. Set ``state`` to the federation's state before that (None: the
    federation is still running).
    """

    state: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def begin(self, federation: FederationView) -> int:
        """Open the run of ``federation``; returns the last round that it already holds (-1: none)."""

    @abstractmethod
    def log(self, report: RoundReport) -> None:
        """Write the numbers of one round."""

    @abstractmethod
    def close(self) -> None:
        """End the run."""


class TensorBoard(Tracker):
    """Writes event files, in a subfolder of ``folder`` for each federation."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def begin(self, federation: FederationView) -> int:
        """Open a new file, which replaces an earlier one in TensorBoard from round 0 on."""
        try:
            self._writer = self._make(str(self._folder / f"{federation.name}-{federation.id}"), purge_step=0)
        except OSError as error:
            raise CommandError(f"cannot write into {self._folder}: {why(error)}", Exit.BAD_INPUT) from None
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings_of(federation.spec).items())
        self._writer.add_text("settings", f"| key | value |\n| --- | --- |\n{rows}", 0)
        return -1

    def log(self, report: RoundReport) -> None:
        for name, value in metrics_of(report).items():
            self._writer.add_scalar(name, value, report.round)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Tracker):
    """Writes to a run of the experiment ``promptfed`` at the tracking server or database ``uri``."""

    def __init__(self, uri: str):
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _missing("mlflow") from None
        self._error: type[Exception] = MlflowException
        self._run = ""
        with self._refusals(uri):
            self._client = MlflowClient(tracking_uri=uri)

    def begin(self, federation: FederationView) -> int:
        """Open a run, or continue an interrupted one."""
        with self._refusals(federation.name):
            known = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(EXPERIMENT)
            runs = self._client.search_runs([experiment], f"tags.`{FEDERATION_TAG}` = '{federation.id}'", max_results=1)
            if runs:
                self._run = runs[0].info.run_id
                return int(runs[0].data.tags.get(ROUND_TAG, -1))
            tags = {FEDERATION_TAG: federation.id}
            self._run = self._client.create_run(experiment, run_name=federation.name, tags=tags).info.run_id
            for key, value in settings_of(federation.spec).items():
                self._client.log_param(self._run, key, value[:500])
        return -1

    def log(self, report: RoundReport) -> None:
        with self._refusals(f"round {report.round}"):
            for name, value in metrics_of(report).items():
                self._client.log_metric(self._run, NOT_IN_MLFLOW.sub(":", name), value, step=report.round)
            self._client.set_tag(self._run, ROUND_TAG, str(report.round))

    def close(self) -> None:
        if self._run and self.state is not None:
            status = {"finished": "FINISHED", "cancelled": "KILLED"}.get(self.state, "FAILED")
            with self._refusals("the end"):
                self._client.set_terminated(self._run, status)

    @contextmanager
    def _refusals(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            text = " ".join(str(error).split())[:300]
            raise CommandError(f"MLflow refuses {what}: {text}", Exit.FAILED) from None


TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": lambda place: TensorBoard(Path(place)),
    "mlflow": MLflow,
}


def _missing(extra: str) -> CommandError:
    return CommandError(f"{extra} is not installed: pip install 'promptfed[{extra}]'", Exit.BAD_INPUT)


def open_tracker(where: str) -> Tracker:
    """The tracker of ``tensorboard:FOLDER`` or ``mlflow:URI``.

    Raises:
        CommandError: the tracker does not exist, or its library is not installed.
    """
    kind, _, place = where.partition(":")
    if kind not in TRACKERS or not place:
        raise CommandError(f"{where!r} is not a tracker: write tensorboard:FOLDER or mlflow:URI", Exit.BAD_INPUT)
    return TRACKERS[kind](place)


def record(tracker: Tracker, result: FederationResult) -> None:
    """Write all rounds of a result."""
    last = tracker.begin(result.federation)
    for report in result.round_reports:
        if report.round > last:
            tracker.log(report)
    tracker.state = result.federation.state


def track(
    api: Coordinator, federation: str, trackers: list[Tracker], progress: Callable[[Snapshot, int], None]
) -> Snapshot:
    """Follow a federation and write each finished round; ``progress`` receives changes and the last written round."""
    view = api.send(get_federation(federation)).view
    last = [tracker.begin(view) for tracker in trackers]
    for snapshot in follow(api, federation):
        for report in _over(api, federation, min(last), ended=snapshot.state in ENDED):
            for place, tracker in enumerate(trackers):
                if report.round > last[place]:
                    tracker.log(report)
                    last[place] = report.round
        progress(snapshot, min(last))
    for tracker in trackers:
        tracker.state = snapshot.state if snapshot.state != "paused" else None
    return snapshot


def _over(api: Coordinator, federation: str, last: int, ended: bool) -> Iterator[RoundReport]:
    """Reports of the finished rounds after ``last``; all of them if the federation has ``ended``."""
    after = str(last) if last >= 0 else None
    while True:
        page = api.send(get_rounds(federation, after)).view
        yield from (report for report in page.rounds if ended or report.ended_at is not None)
        after = page.next
        if after is None:
            return


def settings_of(spec: FederationSpec) -> dict[str, str]:
    """A resolved spec as a flat mapping of text, with keys such as ``training.learning_rate``."""
    return _flat(spec.model_dump(mode="json"), "")


def _flat(section: Mapping[str, Any], prefix: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for key, value in section.items():
        settings |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)}
    return settings


def metrics_of(report: RoundReport) -> dict[str, float]:
    """The numbers of a round: ``loss/PHASE``, ``accuracy/ROLE/SPLIT``, accuracies of each client, bytes and seconds."""
    metrics: dict[str, float] = {"bytes/up": report.bytes_up, "bytes/down": report.bytes_down}
    if report.seconds is not None:
        metrics["seconds/round"] = report.seconds
    for phase in report.phases:
        metrics |= {f"{name}/{phase.phase}": value for name, value in phase.metrics.items()}
        metrics |= {f"{name}/{phase.phase}": value for name, value in phase.measured.phase.items()}
        metrics |= {f"asked/{phase.phase}": len(phase.asked), f"counted/{phase.phase}": len(phase.counted)}
        metrics |= {f"norm/{phase.phase}/{update.client}": update.norm for update in phase.updates}
    if report.evaluation is not None:
        for role, splits in report.evaluation.by_split.items():
            for split, means in splits.items():
                metrics |= {f"{name}/{role}/{split}": value for name, value in means.items()}
        for client, measured in report.evaluation.clients.items():
            own = {name: split.accuracy for name, split in measured.splits.items()}
            metrics |= {f"accuracy/client {client}/{name}": accuracy for name, accuracy in own.items()}
    return {name: float(value) for name, value in metrics.items()}
