"""When a coordinator has lost its object store, and when it has it again."""

from __future__ import annotations

import pytest

from promptfed.coordinator.store import bucket as objects_watch
from promptfed.coordinator.store.bucket import ObjectStoreAway, ObjectsWatch


class Bucket:
    """A bucket that works or not, and notes whether each probe wrote."""

    def __init__(self) -> None:
        self.failed = self.broken = False
        self.wrote: list[bool] = []

    def probe(self, writes: bool) -> None:
        self.wrote.append(writes)
        if self.broken:
            raise ObjectStoreAway("the object store does not answer: refused")


class Clock:
    """The monotonic clock, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(objects_watch, "time", made)
    return made


def looks(watch: ObjectsWatch, clock: Clock, seconds: float) -> None:
    """Look for so long."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += watch.look()


def test_one_failure_is_no_loss_and_a_lost_store_is_noticed_and_given_up_in_time(clock: Clock) -> None:
    bucket = Bucket()
    watch = ObjectsWatch(bucket)
    looks(watch, clock, 10)
    assert bucket.wrote[:3] == [False, False, False], "while all is well it is only read"
    bucket.broken = True
    watch.look()
    assert watch.lost is None
    bucket.broken = False
    watch.look()
    assert bucket.wrote[-1] is True, "it is not trusted before it was written"
    bucket.broken, lost_at = True, clock.now
    looks(watch, clock, 2)
    assert watch.lost is not None
    assert not watch.gives_away, "others may have lost the same store, and say so soon"
    while not watch.gives_away:
        looks(watch, clock, 0.1)
    assert clock.now - lost_at < 7


def test_a_store_that_comes_and_goes_is_trusted_later_each_time(clock: Clock) -> None:
    bucket = Bucket()
    watch = ObjectsWatch(bucket)
    trials = []
    for _ in range(3):
        bucket.broken = True
        looks(watch, clock, 5)
        bucket.broken, back = False, clock.now
        assert watch.lost is not None
        while watch.lost is not None:
            looks(watch, clock, 0.1)
            assert not watch.gives_away
        trials.append(clock.now - back)
    assert 5 <= trials[0] < 8
    assert trials[0] < trials[1] < trials[2]


def test_a_write_that_failed_is_followed_by_a_probe_that_writes(clock: Clock) -> None:
    bucket = Bucket()
    watch = ObjectsWatch(bucket)
    bucket.failed = True
    watch.look()
    assert bucket.wrote == [True]
    bucket.failed = False
    looks(watch, clock, objects_watch.WRITE_SECONDS + 3)
    assert True in bucket.wrote[1:], "and now and then in any case"
