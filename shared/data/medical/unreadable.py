"""The error of readers of medical files."""

from __future__ import annotations


class Unreadable(ValueError):
    """A file cannot be read. The text is one of ours: it never has a value of a header, nor a file's name."""
