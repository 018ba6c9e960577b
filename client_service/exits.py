"""Exit codes of the client service, for the program that started it; they agree with the command's where both exist."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Why the client ended."""

    OK = 0  # the federation has ended, or SIGTERM asked to stop
    FAILED = 1  # something broke on our side
    USAGE = 2  # the settings are wrong
    BAD_DATA = 3  # the data source cannot be used, or holds classes that the federation does not know
    UNREACHABLE = 4  # no coordinator answered for as long as the settings allow
    NOT_ALLOWED = 5  # the enrolment token or the client's secret is not accepted
    REFUSED = 6  # the coordinator says why
    NAME_TAKEN = 8  # another client has enrolled under this name
    BACKBONE = 9  # the backbone cannot be loaded, is not permitted here, or is not the federation's
    WITHDRAWN = 10  # the operator has withdrawn this client
    STATE = 11  # the state folder is in use, another client's, or damaged
    PROTOCOL = 12  # the coordinator speaks another protocol version, or answers what makes no sense
    DECLINED = 13  # the data owner was asked and did not want to join; nothing was sent
    INTERRUPTED = 130  # Ctrl-C


class ClientError(Exception):
    """Ends the client: the text goes to the log in one line, ``exit`` is the exit code."""

    def __init__(self, exit: Exit, text: str):
        super().__init__(text)
        self.exit = exit
