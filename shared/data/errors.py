"""The errors of data sources."""

from __future__ import annotations

from collections.abc import Sequence

from promptfed.shared.errors import BadInput

_TOLD = 3  # problems in a message; of further ones only the number


class DataError(BadInput, ValueError):
    """A data URI or its data cannot be used; the message gives the reason in one line.

    ``problems`` has a sentence for every problem, where the message has only the first ones.
    """

    def __init__(self, text: str, problems: Sequence[str] = ()):
        super().__init__(text)
        self.problems = tuple(problems) or (text,)


class Unreadable(ValueError):
    """A file cannot be read. The text is one of ours: it never has a value of a header, nor a file's name."""


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = [f"And {len(problems) - _TOLD} more; `promptfed data show` lists all."] if len(problems) > _TOLD else []
    return [*problems[:_TOLD], *more]
