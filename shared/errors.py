"""The errors of the library: what its user can mend, in a text that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PromptfedError(Exception):
    """The base of all of them. The text is one line, or a heading above several.

    ``kind``: the kind of a coordinator's refusal, such as ``wrong-role``.
    """

    def __init__(self, text: str, kind: str = ""):
        super().__init__(text)
        self.kind = kind

    def saying(self, text: str) -> PromptfedError:
        """An error of the same kind that says ``text``."""
        return (BadInput if isinstance(self, BadInput) else type(self))(text)


class BadInput(PromptfedError):
    """A file, a spec, data or another value cannot be used."""


class Misused(PromptfedError):
    """Arguments or options do not fit together."""


class Failed(PromptfedError):
    """It went wrong while it ran, here or at the coordinator."""


class Unreachable(PromptfedError):
    """No coordinator, cluster or engine gives an answer that can be used."""


class NotAllowed(PromptfedError):
    """There is no token, it is not accepted, or it has another role."""


class Refused(PromptfedError):
    """The coordinator refuses, or an export is not what was signed."""


class EndedBadly(PromptfedError):
    """The federation failed, paused by itself or was cancelled."""


def offences(errors: Sequence[Mapping[str, str]]) -> str:
    """The errors of a spec as text. Each is ``{"path": ..., "detail": ...}``; several become lines under a heading."""
    lines = [f"{error['path']}: {error['detail']}" for error in errors]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} things are wrong:", *lines])


CommandError = PromptfedError
"""Its name in programs of users."""
