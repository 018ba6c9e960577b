"""One text for one value: what is signed, hashed or compared as JSON."""

from __future__ import annotations

import json


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
