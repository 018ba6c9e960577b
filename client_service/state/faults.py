"""Named places at which a test makes a client die, as by a power cut.

``PROMPTFED_CLIENT_FAULT=spend-written:2`` kills the process with SIGKILL when it reaches ``spend-written`` for the
second time. Without the variable a point does nothing.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "PROMPTFED_CLIENT_FAULT"

#: Between two steps of a training.
TRAINING_POINT = "training-step"

_reached: Counter[str] = Counter()


def point(name: str) -> None:
    """Die here if it is armed."""
    wanted, _, count = os.environ.get(VARIABLE, "").partition(":")
    if name != wanted:
        return
    _reached[name] += 1
    if _reached[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
