"""Metrics for Prometheus, without the names of clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from promptfed.coordinator.domain import run_state
from promptfed.coordinator.domain.run_state import Run
from promptfed.coordinator.engine.recorder import Change
from promptfed.shared.api.api_schemas import FAILURES

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
