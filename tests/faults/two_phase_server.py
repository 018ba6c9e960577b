"""``python -m tests.faults.two_phase_server``: the coordinator, with the tests' two-phase method among its methods."""

from __future__ import annotations

import sys

import shared.methods
from coordinator.__main__ import main
from tests.coordinator.two_phase import TwoPhase

if __name__ == "__main__":
    shared.methods.METHODS["two_phase"] = TwoPhase
    sys.exit(main())
