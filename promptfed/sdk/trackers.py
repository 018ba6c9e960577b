"""Metrics and accuracies of a federation's rounds, written to TensorBoard or MLflow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from promptfed.sdk.client import CommandError, Coordinator, Exit
from promptfed.sdk.operations import get_federation, get_rounds
from promptfed.sdk.progress import Snapshot, follow
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.api_schemas import FederationView
from promptfed.shared.api.report_schemas import RoundReport
from promptfed.shared.messages import ENDED
from promptfed.shared.service.reasons import why

EXPERIMENT = "promptfed"
NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")  # characters that MLflow forbids in metric names

Write = Callable[[FederationView, RoundReport], None]


@contextmanager
def _tensorboard(folder: str) -> Iterator[Write]:
    """Event files, in a subfolder of ``folder`` for each federation."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write into {folder}: {why(error)}", Exit.BAD_INPUT) from None

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
        known = client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known is not None else client.create_experiment(EXPERIMENT)

        def write(federation: FederationView, report: RoundReport) -> None:
            if not runs:
                runs.append(client.create_run(experiment, run_name=federation.name).info.run_id)
            for name, value in metrics_of(report).items():
                client.log_metric(runs[0], NOT_IN_MLFLOW.sub(":", name), value, step=report.round)

        yield write
        for run in runs:
            client.set_terminated(run)
    except MlflowException as error:
        raise CommandError(f"MLflow: {' '.join(str(error).split())[:300]}", Exit.FAILED) from None


TRACKERS: dict[str, Callable[[str], AbstractContextManager[Write]]] = {"tensorboard": _tensorboard, "mlflow": _mlflow}


@contextmanager
def open_tracker(where: str) -> Iterator[Write]:
    """A function that writes a round of a federation to ``tensorboard:FOLDER`` or ``mlflow:URI``.

    Raises:
        CommandError: the tracker does not exist, its library is not installed, or it refuses.
    """
    kind, _, place = where.partition(":")
    if kind not in TRACKERS or not place:
        raise CommandError(f"{where!r} is not a tracker: write tensorboard:FOLDER or mlflow:URI", Exit.BAD_INPUT)
    with ExitStack() as stack:
        try:
            write = stack.enter_context(TRACKERS[kind](place))
        except ImportError:
            raise CommandError(f"{kind} is not installed: pip install 'promptfed[{kind}]'", Exit.BAD_INPUT) from None
        yield write


def record(write: Write, result: FederationResult) -> None:
    """Write all rounds of a result."""
    for report in result.round_reports:
        write(result.federation, report)


def track(
    api: Coordinator, federation: str, trackers: Sequence[Write], progress: Callable[[Snapshot, int], None]
) -> Snapshot:
    """Follow a federation and write each finished round; ``progress`` receives changes and the last written round."""
    view, last = api.send(get_federation(federation)).view, -1
    for snapshot in follow(api, federation):
        for report in _rounds_after(api, federation, last):
            if snapshot.state in ENDED or report.ended_at is not None:
                for write in trackers:
                    write(view, report)
                last = report.round
        progress(snapshot, last)
    return snapshot


def _rounds_after(api: Coordinator, federation: str, last: int) -> Iterator[RoundReport]:
    after = str(last) if last >= 0 else None
    while True:
        page = api.send(get_rounds(federation, after)).view
        yield from page.rounds
        after = page.next
        if after is None:
            return


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
