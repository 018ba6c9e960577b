"""The addresses of coordinators that a client was given, for later starts that are given only some of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.service.addresses import Addresses

log = logging.getLogger("promptfed.client")

FILE = "coordinators.json"


def add_known(addresses: Addresses, folder: Path, allowed: Callable[[str], bool]) -> None:
    """Add the addresses in the state folder, where those that were given are among them and ``allowed`` lets them.

    A file that cannot be read has none.
    """
    try:
        stored = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(stored, list) and set(addresses.all) <= {one for one in stored if isinstance(one, str)}:
        addresses.all += [one for one in stored if isinstance(one, str) and one not in addresses.all and allowed(one)]


def keep_known(addresses: Addresses, state: PrivateState) -> None:
    """Write the addresses down, where there are several."""
    if addresses.several:
        try:
            state.write_as(FILE, addresses.all)
        except OSError as error:
            log.warning("the addresses of the coordinators are not kept for a restart: %s", error.strerror)
