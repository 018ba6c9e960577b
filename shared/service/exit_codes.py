"""Exit codes of the command and of a client. A coordinator ends with 0, 2 (it cannot start) or 3 (no database)."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a code means to the program that started it."""

    OK = 0  # of a client: the federation has ended, or SIGTERM asked to stop
    FAILED = 1  # an error in promptfed or at the coordinator (5xx)
    USAGE = 2  # the command line or the settings are wrong
    BAD_INPUT = 3  # a file, spec or data source is wrong, or holds classes that the federation does not know
    UNREACHABLE = 4  # no coordinator answered within the time that the settings allow
    NOT_ALLOWED = 5  # no token, a token that is not accepted, or one of another role
    REFUSED = 6  # the coordinator refused; its answer says why
    FEDERATION_ENDED_BADLY = 7  # the federation failed, paused by itself or was cancelled
    NAME_TAKEN = 8  # another client has enrolled under this name
    BACKBONE = 9  # the backbone cannot be loaded, is not permitted here, or is not the federation's
    WITHDRAWN = 10  # the operator has withdrawn this client, or its owner has withdrawn consent
    STATE = 11  # the state folder is in use, another client's, or damaged
    PROTOCOL = 12  # the coordinator has another protocol version or method, or its answers cannot be read
    DECLINED = 13  # the user declined; nothing was sent or done
    POLICY = 14  # the site's policy forbids it, or cannot be read
    LEDGER = 15  # the privacy budget is spent, or its ledger is damaged or an old copy
    INTERRUPTED = 130  # Ctrl-C
