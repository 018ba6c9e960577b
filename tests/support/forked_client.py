"""What a forked client runs."""

from __future__ import annotations

import os
import sys


def run(arguments: list[str], log: str) -> None:
    """Take part, writing to ``log``."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from promptfed.client_service.__main__ import main

    sys.exit(main(arguments))
