"""Telemetry: metrics without the names of clients, logs as JSON or text, and the times of clients' last requests.

Log lines have the federation, round, phase and client where they are known. Events of a federation have their kind as
message and what else there is to say under ``data``.

Times of requests and bytes downloaded are collected in memory and written every few seconds. They are for people: a
crash loses the last seconds of them. How far a task is, is known in memory alone.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import bindparam, update
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.domain import clock, run_state
from promptfed.coordinator.domain.run_state import Run
from promptfed.coordinator.engine.recorder import Change
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import ClientRow, TaskRow
from promptfed.shared.api.api_schemas import FAILURES
from promptfed.shared.service import process

if TYPE_CHECKING:
    from promptfed.coordinator.domain.federation import Federation


PLURALS = {"task-settled": "tasks-settled"}
FIELDS = ("federation", "round", "phase", "client")
MOST_ITEMS = 20  # of a list: a line is for reading, the whole stands in the reports
SEEN = update(ClientRow).where(ClientRow.id == bindparam("key")).values(last_seen=bindparam("moment"))
PROGRESS_SECONDS = 60.0  # after which a client has said nothing of its task, though it does so every ten
MORE = TaskRow.bytes_down + bindparam("size")
SERVED = update(TaskRow).where(TaskRow.id == bindparam("key")).values(bytes_down=MORE)

UNTELLING = (
    "promptfed_rounds_completed_total",
    "promptfed_phases_completed_total",
    "promptfed_federation_moves_total",
    "promptfed_event_streams",
)
"""What may be told where it is secret who takes part: nothing that counts or times clients' requests."""

ALERTING = (
    *("internal-error", "storage-full", "store-away", "storage-damaged"),
    *("unauthorized", "too-many-failures"),
)
"""Kinds of refusals that `deploy/monitoring/alerts.yaml` watches."""

SECONDS = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200)


def of_event(federation: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A record's extra fields for an event of a federation."""
    known = {"federation": federation} | {name: data[name] for name in FIELDS if name in data}
    return known | {"data": {name: _short(value) for name, value in data.items() if name not in FIELDS}}


def together(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Events as lines: neighbours that tell the same of several clients are one, which names them all.

    Its kind is the plural, and ``clients`` is a text with commas between: a list would be cut.
    """
    for (kind, about), group in groupby(events, lambda event: (event[0], _without_client(event[1]))):
        some = list(group)
        if about is None or len(some) == 1 or kind not in PLURALS:
            yield from some
        else:
            yield PLURALS[kind], {**about, "clients": ", ".join(data["client"] for _, data in some)}


def _without_client(data: Mapping[str, Any]) -> dict[str, Any] | None:
    return {name: value for name, value in data.items() if name != "client"} if "client" in data else None


def where(federation: Federation) -> dict[str, Any]:
    """A record's extra fields for something that befell a federation as it stands."""
    return {"federation": federation.name, "round": federation.run.round} | (
        {"phase": federation.phase} if federation.phase else {}
    )


def _short(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) > MOST_ITEMS:
        return [*value[:MOST_ITEMS], f"... and {len(value) - MOST_ITEMS} more"]
    return value


class JsonFormatter(process.JsonLines):
    """A record as JSON; secrets never get here, because nothing logs headers or bodies."""

    fields = (*FIELDS, "data")


class TextFormatter(process.TextLines):
    """A record as a line for people: message, place, and ``KEY=VALUE`` for all else that an event tells."""

    def words(self, record: logging.LogRecord) -> str:
        """Message, place and facts."""
        where = [f"{name} {getattr(record, name)}" for name in FIELDS if getattr(record, name, None) is not None]
        facts = [f"{name}={_told(value)}" for name, value in getattr(record, "data", {}).items() if value is not None]
        place = [f"({', '.join(where)})"] if where else []
        return " ".join([record.getMessage(), *place, *facts])


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def configure(level: str, format: Literal["auto", "text", "json"] = "json") -> None:
    """Send everything to stderr: as JSON, as text, or ``auto``, as text where a terminal is watching."""
    as_text = format == "text" or (format == "auto" and sys.stderr.isatty())
    process.log_to_stderr(TextFormatter() if as_text else JsonFormatter(), level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


class LastSeen:
    """Clients' last requests, and bytes served by task."""

    def __init__(self, database: Database):
        self._database = database
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # seconds of the epoch
        self._bytes: collections.Counter[str] = collections.Counter()
        self._progress: dict[str, tuple[float, float]] = {}  # by task: when it was told, and the part that is done

    def is_at(self, task_id: str, done: float) -> None:
        """Note what a client says of its open task."""
        with self._lock:
            self._progress[task_id] = clock.monotonic(), done

    def progress(self, task_id: str) -> float | None:
        """The part of the task that is done, if its client has told it lately."""
        told = self._progress.get(task_id)
        return told[1] if told is not None and clock.monotonic() - told[0] < PROGRESS_SECONDS else None

    def seen(self, client_id: str) -> None:
        """Note a client's request."""
        with self._lock:
            self._seen[client_id] = time.time()

    def served(self, task_id: str, size: int) -> None:
        """Note ``size`` served bytes of a task's payload."""
        with self._lock:
            self._bytes[task_id] += size

    def flush(self) -> None:
        """Write the collected figures, and forget what was told long ago."""
        with self._lock:
            lately = clock.monotonic() - PROGRESS_SECONDS
            self._progress = {task_id: told for task_id, told in self._progress.items() if told[0] > lately}
            seen, served = self._seen, self._bytes
            self._seen, self._bytes = {}, collections.Counter()
        if not seen and not served:
            return
        try:
            with self._database.write() as session:
                connection = session.connection()
                if seen:
                    connection.execute(SEEN, [{"key": key, "moment": clock.text(at)} for key, at in seen.items()])
                if served:
                    connection.execute(SERVED, [{"key": key, "size": size} for key, size in served.items()])
        except SQLAlchemyError:
            with self._lock:
                # A full disk costs nothing of it. What has come since is newer.
                self._seen = seen | self._seen
                self._bytes.update(served)
            raise

    def flush_if_possible(self) -> None:
        """As ``flush``, ignoring a database that cannot be written, for callers that only read."""
        with contextlib.suppress(SQLAlchemyError):
            self.flush()


class Metrics:
    """The coordinator's own registry: several coordinators can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._secret = False
        self.refusals = self._counter("refusals", "Refusals by kind", "kind")
        self.answers = self._counter("tasks_settled", "Tasks by how they ended", "status")
        self.updates = self._counter(
            "updates", "Training updates by verdict: of the rule, or refused, or late for their phase", "verdict"
        )
        self.rounds = self._counter("rounds_completed", "Rounds that are over")
        self.phases = self._counter("phases_completed", "Phases and evaluations completed")
        self.moves = self._counter("federation_moves", "Changes of a federation's state", "state")
        self.bytes_up = self._counter("update_bytes", "Bytes of accepted updates")
        self.bytes_down = self._counter("payload_bytes", "Bytes of payloads served")
        self.private = self._counter(
            "privacy_failures", "Tasks that a client's privacy budget or its site's policy refused", "kind"
        )
        self.waiting = Gauge("promptfed_waiting_clients", "Requests that wait for a task", registry=self.registry)
        self.streams = Gauge("promptfed_event_streams", "Event streams under way", registry=self.registry)
        self.uploads = Gauge("promptfed_uploads", "Uploads under way", registry=self.registry)
        self.job_seconds = self._histogram("work_seconds", "Tensor work by kind", "kind")
        self.stages = self._histogram("phase_seconds", "From a phase's opening to its committed state, by kind", "kind")
        self.receiving = self._histogram("update_seconds", "From the head of an update's request until it is stored")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Series that an alert watches are there from the start: Prometheus sees no increase in a first value."""
        for state in ("paused", "failed"):
            self.moves.labels(state)
        for verdict in ("refused", "rejected"):
            self.updates.labels(verdict)
        for kind in ALERTING:
            self.refusals.labels(kind)
        for kind in sorted(FAILURES):
            self.private.labels(kind)

    def observe(self, change: Change, before: Run) -> None:
        """Count what a committed change did to a run that stood at ``before``."""
        self._secret = self._secret or change.federation.spec.participation.is_secret
        self.rounds.inc(max(0, _rounds_over(change.federation.run) - _rounds_over(before)))
        for kind, seconds in change.completed:
            self.stages.labels(kind).observe(seconds)
        for fact in change.recorded:
            match fact:
                case run_state.Settled(_, status):
                    self.answers.labels(status).inc()
                case run_state.Completed():
                    self.phases.inc()
                case run_state.Moved(state, _):
                    self.moves.labels(state).inc()

    def refused(self, kind: str, of_update: bool) -> None:
        """Count a refusal by its kind; one of an update counts as a verdict on it too."""
        self.refusals.labels(kind).inc()
        if of_update:
            self.updates.labels("late" if kind == "phase-closed" else "refused").inc()

    def failed(self, kind: str) -> None:
        """Count a task that its client refused; others' types, which clients make up, are no labels."""
        if kind in FAILURES:
            self.private.labels(kind).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' exposition format; few of them once a federation has sampled in secret.

        They are the coordinator's in all and open to anyone: any of the others tells how many took part.
        """
        return generate_latest(self.registry.restricted_registry(UNTELLING) if self._secret else self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"promptfed_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"promptfed_{name}", text, labels, registry=self.registry, buckets=SECONDS)


def _rounds_over(run: Run) -> int:
    """Round 0 is none, and a round in which a federation failed or was cancelled was not over."""
    return run.round if run.state == "finished" else max(0, run.round - 1)
