"""What a forked client runs."""

from __future__ import annotations

import os
import sys

from promptfed.client_service.state.faults import VARIABLE


def run(arguments: list[str], log: str, fault: str = "") -> None:
    """Take part, writing to ``log``, until the named point ``fault`` is reached."""
    os.environ[VARIABLE] = fault
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from promptfed.client_service.__main__ import main

    sys.exit(main(arguments))
