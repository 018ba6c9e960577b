"""What a method lays under a spec, as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def defaults(
    rounds: int | None = None, sections: Mapping[str, Any] | None = None, **training: float | str
) -> dict[str, Any]:
    """A spec's ``rounds``, ``training`` and other ``sections``, such as aggregation; what is not given is left out."""
    given = {"rounds": rounds, "training": training} | dict(sections or {})
    return {name: value for name, value in given.items() if value}
