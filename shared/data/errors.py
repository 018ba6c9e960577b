"""What data sources raise."""

from __future__ import annotations


class DataError(ValueError):
    """A data URI or the data behind it cannot be used; the message is one sentence that says why."""
