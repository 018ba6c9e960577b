"""A client's activity: as status, as Prometheus metrics, in the log, and through a hook for other programs.

The log has events as sentences, for a data owner to read while the client takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from promptfed.shared.service import process

log = logging.getLogger("promptfed.client")

Stage = Literal[
    "starting", "enrolling", "waiting", "training", "summing", "sending", "evaluating", "ended", "failed", "stopped"
]
Hook = Callable[[str, Mapping[str, Any]], None]


@dataclass
class Status:
    """What ``GET /status`` answers."""

    name: str
    role: str
    federation: str
    coordinator: str
    stage: Stage = "starting"
    client_id: str | None = None
    device: str | None = None
    backbone: str | None = None
    round: int | None = None
    phase: str | None = None
    trained: int = 0
    evaluated: int = 0
    accuracy: float | None = None
    zero_shot: float | None = None
    met: Mapping[str, int] | None = None  # of the last secure sum: others in it, new ones, those that a policy lists
    last_refusal: str | None = None
    last_error: str | None = None


class Monitor:
    """Collects events. Each monitor has its own registry, so that many clients fit into one process."""

    def __init__(self, status: Status, hook: Hook | None = None):
        self.status = status
        self.registry = CollectorRegistry()
        self._hook = hook
        self.record: Hook = lambda event, facts: None  # the site's log, of a client that has one
        self._events = Counter("promptfed_client_events", "What happened", ["event"], registry=self.registry)
        self._events.labels("failed")  # there from the start: Prometheus sees no increase in a first value
        self._seconds = Counter("promptfed_client_training_seconds", "Seconds of training", registry=self.registry)
        self._accuracy = Gauge("promptfed_client_accuracy", "Last accuracy, 0-1", ["prompts"], registry=self.registry)
        self._round = Gauge("promptfed_client_round", "Round of the last task", registry=self.registry)

    def stage(self, stage: Stage) -> None:
        """What the client is doing now."""
        self.status.stage = stage

    def task(self, round: int, phase: str, stage: Stage) -> None:
        """A task has begun."""
        self.status.round, self.status.phase, self.status.stage = round, phase, stage
        self._round.set(round)

    def tell(self, event: str, **facts: Any) -> None:
        """Something happened."""
        status = self.status
        if event == "trained":
            status.trained += 1
            self._seconds.inc(facts.get("train_seconds", 0.0))
        elif event == "evaluated":
            status.evaluated += 1
            status.accuracy, status.zero_shot = facts.get("accuracy"), facts.get("zero_shot")
            for prompts in ("accuracy", "zero_shot"):
                if facts.get(prompts) is not None:
                    self._accuracy.labels("template" if prompts == "zero_shot" else "learned").set(facts[prompts])
        elif event == "met":
            status.met = facts
        elif event == "refused":
            status.last_refusal = str(facts.get("detail"))
        elif event == "failed":
            status.last_error = str(facts.get("detail"))
        self._events.labels(event).inc()
        text = " ".join(f"{key}={_short(value)}" for key, value in facts.items() if value is not None)
        warned = event in ("refused", "failed", "again")
        level = logging.WARNING if warned else logging.INFO
        log.log(level, "%s %s", event, text, extra={"event": event, "facts": facts})
        self.record(event, facts)
        if self._hook is not None:
            self._hook(event, facts)

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON."""
        return asdict(self.status)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class EventJsonLines(process.JsonLines):
    """A record as JSON, with the event and its facts."""

    fields = ("event", "facts")
    time_field = "time"


class EventTextLines(process.TextLines):
    """A record as a line for people: events as sentences."""

    def words(self, record: logging.LogRecord) -> str:
        """The event's sentence, else the message."""
        words = sentence(record.event, record.facts) if hasattr(record, "event") and hasattr(record, "facts") else None
        return words or record.getMessage()


def sentence(event: str, facts: Mapping[str, Any]) -> str | None:
    """One line of text, or None for an event without a sentence of its own."""
    made = {
        "enrolled": _enrolled,
        "trained": _trained,
        "sending": _sending,
        "accepted": _accepted,
        "evaluated": _evaluated,
        "again": _again,
        "sent_again": _sent_again,
        "met": _met,
        "ended": _ended,
    }.get(event)
    return made(facts) if made is not None else None


def _enrolled(facts: Mapping[str, Any]) -> str:
    images = f"{facts['train']} training and {facts['test']} test images"
    return f"enrolled as {facts['client_id']}: {images}; tasks come once the federation has started"


def _trained(facts: Mapping[str, Any]) -> str:
    loss = f"loss {facts['loss']:.4g}, " if "loss" in facts else ""
    payload = f", from {facts['payload'][:19]}..." if "payload" in facts else ""
    took = f"{facts['train_seconds']:.1f} s" if "train_seconds" in facts else f"{facts.get('steps', 0):.0f} steps"
    return f"{_round(facts)} {facts['phase']}: {loss}{took}{payload}"


def _sending(facts: Mapping[str, Any]) -> str:
    """Told at once: the receipt may be held until there is another task."""
    return f"round {facts['round']} {facts['phase']}: sending the update, {facts['bytes']:,} bytes"


def _accepted(facts: Mapping[str, Any]) -> str:
    return f"round {facts['round']} {facts['phase']}: the coordinator has the update, {facts['bytes']:,} bytes"


def _evaluated(facts: Mapping[str, Any]) -> str:
    accuracy, template = facts["accuracy"], facts["zero_shot"]
    if accuracy is None:
        return f"{_round(facts)} evaluated"
    beside = f" (zero-shot {template:.1%})" if template is not None else ""
    shifted = "; nearly all answers are one class: these images are shifted" if facts.get("one_class") else ""
    return f"{_round(facts)} accuracy {accuracy:.1%}{beside}{shifted}"


def _met(facts: Mapping[str, Any]) -> str:
    others = f"{facts['new']} of the {facts['members']} others in the secure sum are new to this client"
    return f"round {facts['round']}: {others}, {facts['listed']} are peers that its policy lists"


def _again(facts: Mapping[str, Any]) -> str:
    return (
        f"the coordinator asks for {_round(facts)} {facts['phase']} again, as one does that was restored from a backup"
    )


def _sent_again(facts: Mapping[str, Any]) -> str:
    return f"{_round(facts)} {facts['phase']}: the coordinator's disk had lost the update, the same bytes went again"


def _ended(facts: Mapping[str, Any]) -> str:
    return f"the federation {facts['federation']} has ended"


def _round(facts: Mapping[str, Any]) -> str:
    return f"round {facts['round']}/{facts['rounds']}"
