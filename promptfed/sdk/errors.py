"""What ends a command, and the exit codes; `promptfed client` has those of `promptfed.client_service.exits`."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a code means to the program that started the command."""

    OK = 0
    FAILED = 1  # something broke on our side or the coordinator's (5xx)
    USAGE = 2  # the command line is wrong
    BAD_INPUT = 3  # a file, spec or data source is wrong
    UNREACHABLE = 4  # no coordinator answers there
    NOT_ALLOWED = 5  # no token, a wrong one, or one of another role
    REFUSED = 6  # the coordinator says why
    FEDERATION_ENDED_BADLY = 7  # the federation failed, paused by itself or was cancelled
    INTERRUPTED = 130  # Ctrl-C


class CommandError(Exception):
    """Ends the command: ``text`` goes to stderr in one line, ``exit`` is the exit code."""

    def __init__(self, text: str, exit: Exit):
        super().__init__(text)
        self.exit = exit
