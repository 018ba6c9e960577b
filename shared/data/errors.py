"""The error that data sources raise."""

from __future__ import annotations


class DataError(ValueError):
    """A data URI or its data cannot be used; the message is one sentence with the reason."""
