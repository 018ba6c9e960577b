"""Prometheus metrics, without the names of clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coordinator.ledger import Change
from coordinator.run import Closed, Completed, Moved, Settled

SECONDS = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200)


class Measures:
    """The coordinator's own registry: several coordinators can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refusals = self._counter("refusals", "Refusals by kind", "kind")
        self.answers = self._counter("tasks_settled", "Tasks by how they ended", "status")
        self.phases = self._counter("phases_completed", "Phases and evaluations completed")
        self.moves = self._counter("federation_moves", "Changes of a federation's state", "state")
        self.counted = self._counter("answers_counted", "Answers that counted when their phase closed")
        self.bytes_up = self._counter("update_bytes", "Bytes of accepted updates")
        self.bytes_down = self._counter("payload_bytes", "Bytes of payloads served")
        self.waiting = Gauge("promptfed_waiting_clients", "Long polls under way", registry=self.registry)
        self.streams = Gauge("promptfed_event_streams", "Event streams under way", registry=self.registry)
        self.uploads = Gauge("promptfed_uploads", "Uploads under way", registry=self.registry)
        self.work = Histogram(
            "promptfed_work_seconds", "Tensor work by kind", ["kind"], registry=self.registry, buckets=SECONDS
        )

    def observe(self, change: Change) -> None:
        """Count what a committed change did."""
        for fact in change.facts:
            match fact:
                case Settled(_, status):
                    self.answers.labels(status).inc()
                case Closed(counted, _):
                    self.counted.inc(len(counted))
                case Completed():
                    self.phases.inc()
                case Moved(state, _):
                    self.moves.labels(state).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"promptfed_{name}", text, labels, registry=self.registry)
