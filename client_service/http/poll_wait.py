"""How long a poll may wait: proxies close connections on which nothing passes, many of them after 20 s."""

from __future__ import annotations

import logging
import math

log = logging.getLogger("promptfed.client")

LONGEST = 60.0  # seconds that a poll ever waits
IDLE = 4.0  # seconds of silence from which a failed poll may have been cut as idle
SHARE = 0.75  # of the time after which one was cut that the next ones wait
GROWTH, QUIET_POLLS = 1.25, 10  # the wait grows again after so many polls that waited in full


class PollWait:
    """Shortens polls that are cut, and lengthens them again when they no longer are."""

    def __init__(self) -> None:
        self._most, self._in_full = LONGEST, 0

    def seconds(self, wanted: int) -> int:
        """How long the next poll waits; ``wanted`` where nothing cuts polls."""
        return min(wanted, math.floor(self._most))

    def answered(self, wait: int, seconds: float) -> None:
        """A poll that was to wait ``wait`` was answered after ``seconds``."""
        if self._most >= LONGEST or wait < math.floor(self._most) or seconds < wait:
            return
        self._in_full += 1
        if self._in_full >= QUIET_POLLS:
            self._most, self._in_full = min(self._most * GROWTH, LONGEST), 0

    def failed(self, wait: int, seconds: float) -> None:
        """A poll that was to wait ``wait`` failed after ``seconds``."""
        if seconds < IDLE or wait < IDLE:
            return
        self._most, self._in_full = max(SHARE * min(seconds, wait), SHARE * IDLE), 0
        log.info("a poll was cut after %.0f s: the next ones wait %d s", seconds, self._most)
