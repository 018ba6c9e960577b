"""A client's events as sentences: what a data owner reads while it takes part."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from promptfed.shared.service import log_lines


class EventJsonLines(log_lines.JsonLines):
    """A record as JSON, with the event and its facts."""

    fields = ("event", "facts")
    time_field = "time"


class EventTextLines(log_lines.TextLines):
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
        "accepted": _accepted,
        "evaluated": _evaluated,
        "again": _again,
        "sent_again": _sent_again,
        "other_payload": _other_payload,
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


def _accepted(facts: Mapping[str, Any]) -> str:
    return f"round {facts['round']} {facts['phase']}: the coordinator has the update, {facts['bytes']:,} bytes"


def _evaluated(facts: Mapping[str, Any]) -> str:
    accuracy, template = facts["accuracy"], facts["zero_shot"]
    if accuracy is None:
        return f"{_round(facts)} evaluated"
    beside = f" (zero-shot {template:.1%})" if template is not None else ""
    return f"{_round(facts)} accuracy {accuracy:.1%}{beside}"


def _other_payload(facts: Mapping[str, Any]) -> str:
    common = f"others got {facts['common']}" if facts["common"] else "it does not say that all got the same"
    return f"{_round(facts)} {facts['phase']}: the coordinator gave this client {facts['payload']}; {common}"


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
