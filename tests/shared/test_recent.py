"""What was used last is kept."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from promptfed.shared.recent import Recent


def test_what_is_too_large_or_kept_already_drives_nothing_out() -> None:
    kept: Recent[str] = Recent(2)
    kept.add("a", "one")
    kept.add("b", "large", size=3)
    kept.add("a", "other", size=2)
    assert (kept.get("a"), kept.get("b")) == ("one", None)
    kept.add("c", "two")
    assert (kept.get("a"), kept.get("c")) == ("one", "two"), "together as large as may be"


def test_what_was_not_used_for_longest_goes_first() -> None:
    kept: Recent[str] = Recent(3)
    for key in "abc":
        assert kept.made(key, lambda key=key: key) == key
    assert kept.made("a", lambda: "made again") == "a"
    kept.add("d", "d")
    assert [key for key in "abcd" if kept.get(key)] == ["a", "c", "d"]
    kept.add("e", "e", size=2)
    assert [key for key in "acde" if kept.get(key)] == ["d", "e"]
    kept.forget(["d", "never kept"])
    kept.add("f", "f")
    assert [key for key in "def" if kept.get(key)] == ["e", "f"], "there is room for it"


def test_one_thread_at_a_time() -> None:
    kept, taken = Recent[str](3), list[str]()

    @contextmanager
    def turn() -> Any:
        taken.append("in")
        yield
        taken.append("out")

    for use in (lambda: kept.add("a", "a"), lambda: kept.get("a"), lambda: kept.forget(["a"])):
        kept._lock, taken[:] = turn(), []
        use()
        assert taken == ["in", "out"]
