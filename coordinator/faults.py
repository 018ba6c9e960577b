"""Fault points: named places at which a test makes the process die, as by a power cut.

``PROMPTFED_FAULT=phase-closed:2`` kills the process with SIGKILL when it reaches ``phase-closed`` for the second time.
Without the variable a point does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

VARIABLE = "PROMPTFED_FAULT"

#: Every point there is, in the order in which a run first reaches them.
POINTS = (
    "federation-created",
    "client-enrolled",
    "start-before-commit",
    "start-committed",
    "payloads-before-commit",
    "payloads-committed",
    "evaluation-before-commit",
    "evaluation-committed",
    "blob-written",
    "blob-renamed",
    "update-received",
    "update-checked",
    "update-before-commit",
    "update-committed",
    "phase-closed",
    "aggregate-computed",
    "state-before-commit",
    "state-committed",
)

_wanted, _, _nth = os.environ.get(VARIABLE, "").partition(":")
_reached: Counter[str] = Counter()
_lock = threading.Lock()


def point(name: str) -> None:
    """Die here if the environment says so."""
    if name != _wanted:
        return
    with _lock:
        _reached[name] += 1
        if _reached[name] == int(_nth or 1):
            os.kill(os.getpid(), signal.SIGKILL)
