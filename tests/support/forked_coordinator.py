"""What a forked coordinator runs; with the tests' two-phase method among its methods."""

from __future__ import annotations

import os
import sys

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.store import fault_points
from promptfed.shared.methods import METHODS
from tests.support.two_phase import TwoPhase


def run(arguments: list[str], fault: str, log: str) -> None:
    """Serve, writing to ``log``, and die at ``fault``."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    METHODS["two_phase"] = TwoPhase
    fault_points.arm(fault)
    sys.exit(main(arguments))
