"""What ends a command, and the exit codes."""

from __future__ import annotations

from promptfed.shared.exit_codes import Exit

__all__ = ["CommandError", "Exit"]


class CommandError(Exception):
    """Ends the command: ``text`` goes to stderr in one line, ``exit`` is the exit code."""

    def __init__(self, text: str, exit: Exit):
        super().__init__(text)
        self.exit = exit
