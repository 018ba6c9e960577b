"""The exception of the frozen backbone layer, and helpers for its text."""

import difflib
from collections.abc import Iterable

from promptfed.shared.errors import BadInput


class BackboneError(BadInput, ValueError):
    """A backbone cannot be loaded or does not support an operation; the message gives the problem and a remedy."""


def near(name: str, known: Iterable[str]) -> str:
    """The names of `known` that are similar to `name`, as the end of a sentence."""
    known = list(known)
    folded = {candidate.lower(): candidate for candidate in known}
    alike = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=5, cutoff=0.5)]
    if alike:
        return "; near: " + ", ".join(alike)
    return "; it has: " + ", ".join(known[:8]) if known else ""


def one_line(error: BaseException) -> str:
    """The error's text, shortened to one line."""
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
