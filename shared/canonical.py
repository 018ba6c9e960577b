"""One text for one value: what is signed, hashed or compared as JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse_json(text: bytes) -> Any:
    """The one value that all readers agree on.

    Raises:
        ValueError: it is no JSON in UTF-8, an object has a key twice, a number is NaN or infinite, or it is nested too
            deeply to be read.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=each_key_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a mapping. Raises ValueError for a repeated key: readers differ in which of two values they take."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return mapping


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}")
