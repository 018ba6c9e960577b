"""The addresses of a group's other coordinators, as they were told, in the state folder."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.service.addresses import AddressBook

log = logging.getLogger("promptfed.client")

FILE = "coordinators.json"


def use_known(book: AddressBook, folder: Path) -> None:
    """Add the addresses that the state folder has; a file that cannot be read has none."""
    try:
        known = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(known, list) and all(isinstance(address, str) for address in known):
        book.told(known)


def keep_known(book: AddressBook, state: PrivateState) -> None:
    """As `use_known`, and write the addresses down whenever a coordinator tells others."""
    use_known(book, state.folder)
    book.changed = partial(_keep, state)


def _keep(state: PrivateState, told: list[str]) -> None:
    try:
        state.write_as(FILE, told)
    except OSError as error:
        log.warning("the addresses of other coordinators are not kept for a restart: %s", error.strerror)
