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
    "blob-row-written",
    "blob-written",
    "blob-renamed",
    "payloads-before-commit",
    "payloads-committed",
    "evaluation-entered",
    "group-stepped",
    "group-before-commit",
    "group-committed",
    "answer-sent",
    "update-received",
    "update-checked",
    "update-entered",
    "phase-closed",
    "aggregate-computed",
    "state-before-commit",
    "state-committed",
)
OF_FILES = ("blob-written", "blob-renamed")
"""Reached where blobs are files, large ones that is."""
OF_ROWS = ("blob-row-written",)
"""Reached where blobs are rows, small ones that is."""

#: Those of a federation's deletion, in their order; the second comes once for each transaction.
DELETION_POINTS = ("federation-hidden", "federation-rows-deleted")

#: Those that only secure sums reach.
SECURE_POINTS = ("exchange-before-commit", "exchange-committed", "sum-computed", "exchanges-deleted")


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
