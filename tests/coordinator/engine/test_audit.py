"""Whose act it is that is noted."""

from __future__ import annotations

import pytest

from promptfed.coordinator.engine.audit import ITSELF, Actor, acting, actor


def test_who_acts_is_known_as_long_as_it_does_also_where_that_fails() -> None:
    first, second = Actor("a"), Actor("b", "admin", "10.0.0.1")
    with acting(first):
        with pytest.raises(ValueError, match="no"), acting(second):
            assert actor.get() is second
            raise ValueError("no")
        assert actor.get() is first
    assert actor.get() is ITSELF
