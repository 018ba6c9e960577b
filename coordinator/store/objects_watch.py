"""A look at the object store every second or two: whether a coordinator of several can carry out federations."""

from __future__ import annotations

import logging
import time

from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway

log = logging.getLogger("promptfed.coordinator")

LOOK_SECONDS = 1.5
AGAIN_SECONDS = 0.5  # after a first failure
WRITE_SECONDS = 30.0  # between two writes while everything works
FAILURES = 2  # in a row that are a loss
PATIENCE_SECONDS = 3.0  # from the loss until federations are given away: others may have lost the same store
TRIAL_SECONDS = 5.0  # that the store must work after a loss; doubled if it is lost again soon
MOST_TRIAL_SECONDS = 300.0


class ObjectsWatch:
    """What a coordinator knows of its object store.

    ``lost``: why it should carry out nothing, from a loss on until the store has worked for a while again.
    """

    def __init__(self, bucket: Bucket):
        self.lost: str | None = None
        self._bucket = bucket
        self._failures = 0
        self._trial = 0.0
        self._lost_at = float("-inf")
        self._works_since = self._written = time.monotonic()

    @property
    def gives_away(self) -> bool:
        """Whether the store has been away for so long that other coordinators should take the federations."""
        return self._failures >= FAILURES and time.monotonic() - self._lost_at >= PATIENCE_SECONDS

    def look(self) -> float:
        """Look once; returns the seconds until the next look."""
        now = time.monotonic()
        writes = self._bucket.failed or self._failures > 0 or now - self._written >= WRITE_SECONDS
        try:
            self._bucket.probe(writes)
        except ObjectStoreAway as error:
            self._note_failure(str(error))
            return AGAIN_SECONDS if self._failures < FAILURES else LOOK_SECONDS
        if writes:
            self._written = now
        self._note_success()
        return LOOK_SECONDS

    def _note_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures != FAILURES:
            return
        now = time.monotonic()
        lost_lately = now - self._lost_at < MOST_TRIAL_SECONDS
        self._trial = min(2 * self._trial, MOST_TRIAL_SECONDS) if lost_lately else TRIAL_SECONDS
        self._lost_at = now
        self.lost = "the object store does not answer"
        log.error("%s", why)

    def _note_success(self) -> None:
        now = time.monotonic()
        if self._failures:
            self._failures, self._works_since = 0, now
        if self.lost is not None and now - self._works_since >= self._trial:
            self.lost = None
            log.info("the object store answers again")
