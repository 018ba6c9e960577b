"""What a data owner reads while a client takes part: a tidy line for each step, events as JSON where asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from promptfed.client_service.log_messages import EventJsonLines, EventTextLines, sentence
from promptfed.client_service.monitor import Monitor, Status


def lines(formatter: logging.Formatter, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the course of a round looks like."""
    monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"))
    with caplog.at_level(logging.INFO, "promptfed.client"):
        for event, facts in COURSE:
            monitor.tell(event, **facts)
    return [formatter.format(record) for record in caplog.records]


COURSE: list[tuple[str, Mapping[str, Any]]] = [
    ("enrolled", {"client_id": "cli-1", "train": 24, "test": 8}),
    ("trained", {"round": 1, "rounds": 8, "phase": "train", "loss": 1.20394, "train_seconds": 1.84}),
    ("accepted", {"round": 1, "phase": "train", "bytes": 7368}),
    ("evaluated", {"round": 1, "rounds": 8, "accuracy": 0.435, "zero_shot": 0.334}),
    ("evaluated", {"round": 2, "rounds": 8, "accuracy": 0.5, "zero_shot": None}),
    ("evaluated", {"round": 3, "rounds": 8, "accuracy": None, "zero_shot": None}),
    ("failed", {"round": 4, "phase": "train", "type": "MethodError", "detail": "lower training.learning_rate"}),
    ("ended", {"federation": "pets", "detail": "the federation finished"}),
]


def test_lines_for_people(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(EventTextLines("%(message)s"), caplog) == [
        "enrolled as cli-1: 24 training and 8 test images; waiting for tasks, which come once the operator has started",
        "round 1/8 train: loss 1.204, 1.8 s",
        "round 1 train: the coordinator has the update, 7,368 bytes",
        "round 1/8 accuracy 43.5% (zero-shot 33.4%)",
        "round 2/8 accuracy 50.0%",
        "round 3/8 evaluated",
        "warning: failed round=4 phase=train type=MethodError detail=lower training.learning_rate",
        "the federation pets has ended",
    ]


def test_protected_training_tells_no_seconds() -> None:
    told = sentence("trained", {"round": 1, "rounds": 8, "phase": "train", "steps": 5, "trained_parameters": 256})
    assert told == "round 1/8 train: 5 steps"


def test_events_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    told = [json.loads(line) for line in lines(EventJsonLines(), caplog)]
    assert [(one["event"], one["facts"]) for one in told] == [(event, dict(facts)) for event, facts in COURSE]


def test_a_traceback_that_another_handler_has_formatted_is_cleaned_too() -> None:
    try:
        raise ValueError("colour \x1b[31m")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "failed", "levelno": logging.ERROR, "levelname": "ERROR", "exc_info": (type(error), error, None)}
        )
    assert "\x1b" in logging.Formatter().format(record)  # keeps its text in the record
    assert "\x1b" not in EventTextLines("%(message)s").format(record)


def test_a_plain_message_stays_what_it_is() -> None:
    record = logging.makeLogRecord({"msg": "api %s", "args": ("http://127.0.0.1:1",), "levelno": logging.INFO})
    assert EventTextLines("%(message)s").format(record) == "api http://127.0.0.1:1"
