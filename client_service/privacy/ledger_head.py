"""The head of the ledger as this client saw it last, kept in its state folder: it exposes an old copy of the ledger.

The note holds how many lines the ledger had after this client's last spend, and the SHA-256 of the last of them. A
ledger that has fewer lines, or another one there, is a restored copy, was lost, or is another data set's.
"""

from __future__ import annotations

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.ledger import Head, Ledger
from promptfed.client_service.state.private_state import PrivateState

FILE = "ledger-head.json"


def keep_head(ledger: Ledger, state: PrivateState) -> None:
    """Note the head of ``ledger``. A ledger in memory has none that outlives the process."""
    if ledger.path is not None:
        state.write_as(FILE, ledger.head())


def expect_head(ledger: Ledger, state: PrivateState) -> None:
    """Raise ClientError (LEDGER) if ``ledger`` does not begin with the lines that this client has seen."""
    known = _known(ledger, state)
    if known is None:
        return
    head = ledger.head(known.count)
    if head != known:
        there = "another line" if head.count == known.count else f"{head.count} lines"
        raise ClientError(
            Exit.LEDGER,
            f"ledger-behind: the ledger {ledger.path} has {there} where {state.folder} knows of {known.count}: it is "
            "an old copy, or another data set's. Restore the newest one, or write down what is missing by `promptfed "
            "ledger adopt` with every state folder that has used it; nothing was sent",
        )


def adopt_head(ledger: Ledger, state: PrivateState) -> None:
    """Note the head of a ledger to which the missing lines have been added.

    Raises:
        ClientError: LEDGER where it has fewer lines than this client knew of: something is missing still.
    """
    known = _known(ledger, state)
    if known is None:
        return
    if ledger.head().count < known.count:
        expect_head(ledger, state)
    keep_head(ledger, state)


def _known(ledger: Ledger, state: PrivateState) -> Head | None:
    return state.read_as(FILE, Head) if ledger.path is not None else None
