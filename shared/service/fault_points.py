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

_armed = os.environ.get(VARIABLE, "")
_reached: Counter[str] = Counter()
_lock = threading.Lock()


def arm(fault: str) -> None:
    """Die at ``fault`` (``name:count``; empty: nowhere), whatever the environment says."""
    global _armed
    _armed = fault


def point(name: str) -> None:
    """Die here if it is armed."""
    armed, _, count = _armed.partition(":")
    if name != armed:
        return
    with _lock:
        _reached[name] += 1
        if _reached[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
