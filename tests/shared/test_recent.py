"""What was used last is kept."""

from __future__ import annotations

from promptfed.shared.recent import Recent


def test_what_is_too_large_or_kept_already_drives_nothing_out() -> None:
    kept: Recent[str] = Recent(2)
    kept.add("a", "one")
    kept.add("b", "large", size=3)
    kept.add("a", "other", size=2)
    assert (kept.get("a"), kept.get("b")) == ("one", None)
    kept.add("c", "two")
    assert (kept.get("a"), kept.get("c")) == ("one", "two"), "together as large as may be"
