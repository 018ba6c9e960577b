"""How long tests wait for what must happen: a bound on what hangs, never a measure of speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from promptfed.testing.clients import PATIENCE as PATIENCE

T = TypeVar("T")


def wait_for(
    what: str,
    condition: Callable[[], T],
    *,
    seconds: float = PATIENCE,
    every: float = 0.02,
    ended: Callable[[], str | None] = lambda: None,
) -> T:
    """What ``condition`` returns once that is true.

    AssertionError after ``seconds``, or at once where ``ended`` gives the reason why it never will be.
    """
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        reason = ended()
        assert reason is None, f"{what} did not happen: {reason}"
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(every)
    return outcome


def start_and_join(threads: Sequence[threading.Thread]) -> None:
    """Run all at the same time, to their ends."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread does not end"
