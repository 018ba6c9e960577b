"""What ends a client, and the exit codes."""

from __future__ import annotations

from promptfed.shared.service.reasons import Exit

__all__ = ["ClientError", "Exit", "Failure"]


class Failure(ValueError):
    """A task that is not carried out: ``kind`` and the text go to the coordinator, and nothing else."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class ClientError(Exception):
    """Ends the client: the text goes to the log in one line, ``exit`` is the exit code."""

    def __init__(self, exit: Exit, text: str):
        super().__init__(text)
        self.exit = exit
