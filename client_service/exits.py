"""What ends a client, and the exit codes."""

from __future__ import annotations

from promptfed.shared.exit_codes import Exit

__all__ = ["ClientError", "Exit"]


class ClientError(Exception):
    """Ends the client: the text goes to the log in one line, ``exit`` is the exit code."""

    def __init__(self, exit: Exit, text: str):
        super().__init__(text)
        self.exit = exit
