"""The error that ends a command, and the exit codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from promptfed.shared.service.exit_codes import Exit

__all__ = ["CommandError", "Exit", "offences"]


class CommandError(Exception):
    """Ends the command with exit code ``exit``. It prints ``text`` on stderr: one line, or a list of several errors.

    ``kind``: the kind of a coordinator's refusal, such as ``wrong-role``.
    """

    def __init__(self, text: str, exit: Exit, kind: str = ""):
        super().__init__(text)
        self.exit, self.kind = exit, kind


def offences(errors: Sequence[Mapping[str, str]]) -> str:
    """The errors of a spec as text. Each is ``{"path": ..., "detail": ...}``; several become lines under a heading."""
    told = [f"{error['path']}: {error['detail']}" for error in errors]
    return told[0] if len(told) == 1 else "\n  ".join([f"{len(told)} things are wrong:", *told])
