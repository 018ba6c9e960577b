"""What a forked coordinator runs; with the tests' two-phase method among its methods."""

from __future__ import annotations

import importlib
import os
import sys

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.store import fault_points
from promptfed.shared.methods import METHODS
from tests.support.two_phase import TwoPhase


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
    fault_points.arm(fault)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    sys.exit(main(arguments))
