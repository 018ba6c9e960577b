"""What a forked coordinator runs; with the tests' two-phase method among its methods."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.postgres import together
from promptfed.shared.methods import METHODS
from promptfed.shared.service import fault_points
from tests.support.two_phase import TwoPhase

STOPS_INSIDE, STOPS_NOT = signal.SIGUSR1, signal.SIGUSR2
"""Has the process stop itself within its next transaction, between statements that are sent together, or not."""

_stop_inside = False


def _note_wish(number: int, frame: object) -> None:
    global _stop_inside
    _stop_inside = number == STOPS_INSIDE


@contextmanager
def _together_and_stopping(connection: Connection) -> Iterator[None]:
    global _stop_inside
    with together(connection):
        yield
        if _stop_inside:
            _stop_inside = False
            connection.connection.driver_connection.pgconn.flush()
            os.kill(os.getpid(), signal.SIGSTOP)


def run(
    arguments: list[str], fault: str, log: str, constants: dict[str, float], environment: dict[str, str] | None = None
) -> None:
    """Serve, writing to ``log``, and die at ``fault``; ``constants`` are laid over those of the code, by full name,
    and ``environment`` over the variables of the process that this one was forked from.
    """
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment or {})
    METHODS["two_phase"] = TwoPhase
    for number in (STOPS_INSIDE, STOPS_NOT):
        signal.signal(number, _note_wish)
    queries.together = _together_and_stopping
    fault_points.arm(fault)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    sys.exit(main(arguments))
