"""Who is not ready says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.coordinator.problems import NotReady
from promptfed.coordinator.resources.health import readyz


@pytest.mark.parametrize(
    ("away", "ready", "full", "why"),
    [
        (True, True, None, "the database is away"),
        (False, False, None, "the engine is stopping"),
        (False, True, "the disk is full", "the disk is full"),
        (False, True, None, None),
    ],
)
def test_each_reason_is_told(away: bool, ready: bool, full: str | None, why: str | None) -> None:
    writable = SimpleNamespace(why_not=lambda: full)
    registry = cast(Any, SimpleNamespace(away=away, ready=ready, writable=writable))
    if why is None:
        assert readyz(registry).status == "ok"
        return
    with pytest.raises(NotReady, match=why):
        readyz(registry)
