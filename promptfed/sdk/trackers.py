"""Experiment trackers behind one small seam: what a federation's reports say goes to TensorBoard or MLflow.

`Tracker` is the seam; each tracker is one class that imports its library where it is asked for (the extras
``promptfed[tensorboard]`` and ``promptfed[mlflow]``). Numbers come from the coordinator's reports alone, so that a
federation anywhere, running or finished, can be followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from promptfed.sdk.client import CommandError, Coordinator
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.progress import ENDED, Snapshot, follow, pages
from promptfed.sdk.snapshot import Taken

FEDERATION_TAG, ROUND_TAG = "promptfed.federation", "promptfed.round"
EXPERIMENT = "promptfed"
NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")  # in the name of a metric


class Tracker(Protocol):
    """Where metrics go: one run of the tracker for each federation, one step for each round."""

    def begin(self, name: str, id: str, settings: dict[str, str]) -> int:
        """Open the run of a federation; the last round that it already holds, -1 for none."""

    def log(self, round: int, metrics: dict[str, float]) -> None:
        """Write the numbers of one round."""

    def close(self, state: str | None) -> None:
        """End the run; ``state`` is the federation's, None where it goes on."""


class TensorBoard:
    """Event files in a folder of the federation's own under ``folder``."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def begin(self, name: str, id: str, settings: dict[str, str]) -> int:
        """As `Tracker` says. A second run replaces the first: what stands from round 0 on is not shown any more."""
        try:
            self._writer = self._make(str(self._folder / f"{name}-{id}"), purge_step=0)
        except OSError as error:
            raise CommandError(f"cannot write into {self._folder}: {error.strerror}", Exit.BAD_INPUT) from None
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| key | value |\n| --- | --- |\n{rows}", 0)
        return -1

    def log(self, round: int, metrics: dict[str, float]) -> None:
        """As `Tracker` says."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, state: str | None) -> None:
        """As `Tracker` says."""
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run in the experiment ``promptfed`` of the tracking server or database at ``uri``."""

    def __init__(self, uri: str):
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _missing("mlflow") from None
        self._error: type[Exception] = MlflowException
        self._run = ""
        with self._told(uri):
            self._client = MlflowClient(tracking_uri=uri)

    def begin(self, name: str, id: str, settings: dict[str, str]) -> int:
        """As `Tracker` says: a run that was left off is gone on with."""
        with self._told(name):
            known = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(EXPERIMENT)
            found = self._client.search_runs([experiment], f"tags.`{FEDERATION_TAG}` = '{id}'", max_results=1)
            if found:
                self._run = found[0].info.run_id
                return int(found[0].data.tags.get(ROUND_TAG, -1))
            made = self._client.create_run(experiment, run_name=name, tags={FEDERATION_TAG: id})
            self._run = made.info.run_id
            for key, value in settings.items():
                self._client.log_param(self._run, key, value[:500])
        return -1

    def log(self, round: int, metrics: dict[str, float]) -> None:
        """As `Tracker` says."""
        with self._told(f"round {round}"):
            for name, value in metrics.items():
                self._client.log_metric(self._run, NOT_IN_MLFLOW.sub(":", name), value, step=round)
            self._client.set_tag(self._run, ROUND_TAG, str(round))

    def close(self, state: str | None) -> None:
        """As `Tracker` says."""
        if self._run and state is not None:
            status = {"finished": "FINISHED", "cancelled": "KILLED"}.get(state, "FAILED")
            with self._told("the end"):
                self._client.set_terminated(self._run, status)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            text = " ".join(str(error).split())[:300]
            raise CommandError(f"MLflow refuses {what}: {text}", Exit.FAILED) from None


class _Closing:
    """A tracker that is closed with its block; ``state`` is set by who knows how the federation stands."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self.state: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.close(self.state)

    def begin(self, federation: dict[str, Any]) -> int:
        """The run of ``federation``, as its coordinator tells of it."""
        return self._tracker.begin(federation["name"], federation["id"], settings_of(federation["spec"]))

    def log(self, report: dict[str, Any]) -> None:
        """One round's report."""
        self._tracker.log(report["round"], metrics_of(report))


TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": lambda place: TensorBoard(Path(place)),
    "mlflow": MLflow,
}


def _missing(extra: str) -> CommandError:
    return CommandError(f"{extra} is not installed: pip install 'promptfed[{extra}]'", Exit.BAD_INPUT)


def open_tracker(where: str) -> _Closing:
    """The tracker of ``tensorboard:FOLDER`` or ``mlflow:URI``.

    Raises:
        CommandError: there is no such tracker, or it is not installed.
    """
    kind, _, place = where.partition(":")
    if kind not in TRACKERS or not place:
        raise CommandError(f"{where!r} is no tracker: write tensorboard:FOLDER or mlflow:URI", Exit.BAD_INPUT)
    return _Closing(TRACKERS[kind](place))


def record(tracker: _Closing, taken: Taken) -> None:
    """Write all rounds of what was taken."""
    last = tracker.begin(taken.federation)
    for report in taken.reports:
        if report["round"] > last:
            tracker.log(report)
    tracker.state = taken.federation["state"]


def track(
    api: Coordinator, federation: str, trackers: list[_Closing], told: Callable[[Snapshot, int], None]
) -> Snapshot:
    """Follow a federation and write each round once it is over; ``told`` hears of every change and the last round
    written."""
    last = [tracker.begin(api.get(f"/v1/federations/{federation}")) for tracker in trackers]
    for snapshot in follow(api, federation):
        for report in _over(api, federation, min(last), ended=snapshot.state in ENDED):
            for place, tracker in enumerate(trackers):
                if report["round"] > last[place]:
                    tracker.log(report)
                    last[place] = report["round"]
        told(snapshot, min(last))
    for tracker in trackers:
        tracker.state = snapshot.state if snapshot.state != "paused" else None
    return snapshot


def _over(api: Coordinator, federation: str, last: int, ended: bool) -> Iterator[dict[str, Any]]:
    """Reports of the rounds behind ``last`` that are over: all, where the federation has ``ended``."""
    after = str(last) if last >= 0 else None
    for report in pages(api, f"/v1/federations/{federation}/rounds", "rounds", after):
        if ended or report["ended_at"] is not None:
            yield report


def settings_of(spec: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A resolved spec as flat text: ``training.learning_rate`` and so on."""
    found: dict[str, str] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            found |= settings_of(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = str(value)
    return found


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of a round: ``loss/PHASE``, ``accuracy/ROLE/SPLIT`` and of each client, bytes, seconds."""
    found: dict[str, float] = {f"bytes/{way}": report[f"bytes_{way}"] for way in ("up", "down")}
    if report["seconds"] is not None:
        found["seconds/round"] = report["seconds"]
    for phase in report["phases"]:
        found |= {f"{name}/{phase['phase']}": value for name, value in phase["metrics"].items()}
        found |= {f"{name}/{phase['phase']}": value for name, value in phase["measured"].get("phase", {}).items()}
        found |= {f"{key}/{phase['phase']}": len(phase[key]) for key in ("asked", "counted")}
        found |= {f"norm/{phase['phase']}/{one['client']}": one["norm"] for one in phase["updates"]}
    evaluation = report["evaluation"]
    if evaluation is not None:
        for role, splits in evaluation["by_split"].items():
            for split, means in splits.items():
                found |= {f"{name}/{role}/{split}": value for name, value in means.items()}
        for client, one in evaluation["clients"].items():
            found |= {f"accuracy/client {client}/{name}": split["accuracy"] for name, split in one["splits"].items()}
    return {name: float(value) for name, value in found.items()}
