"""Which data URIs name pictures that are promptfed's own drawings. Importing this module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

DRAWN = frozenset({"symbols", "digits", "emoji", "emoji-scenes"})
"""Schemes of the pictures that come with promptfed."""


def all_drawn(uris: Iterable[str]) -> bool:
    """Whether all of these URIs name embedded drawings."""
    return {re.split("[:?]", uri, maxsplit=1)[0] for uri in uris} <= DRAWN
