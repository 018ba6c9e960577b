"""The addresses of several coordinators that share their federations, as a caller knows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from promptfed.shared.service.net import addresses_of, origin_for

TOLD = "Promptfed-Coordinators"
"""The header in which a coordinator of a group names the group's addresses, to callers with a valid token."""

QUIET_SECONDS = 3.0  # without a byte, after which a caller asks ``/readyz`` whether the coordinator is there
GONE_SECONDS = 5.0  # without a byte and without an answer to that: the caller moves on to the next address
MOST_ADDRESSES, LONGEST_ADDRESS = 16, 300


class AddressBook:
    """Which coordinator to ask next: one of those ``given`` (separated by commas), or of those that were told since.

    A told address is used only if it is as well protected as the given ones (`net.origin_for`) and ``allowed``.
    ``changed`` is called with the told addresses whenever they change.
    """

    def __init__(self, given: str):
        self.given = given
        self.allowed: Callable[[str], bool] = lambda origin: True
        self.changed: Callable[[list[str]], None] = lambda told: None
        self._first = addresses_of(given)
        self._told: list[str] = []
        self._header: str | None = None
        self._silent: dict[str, float] = {}
        self.current = self._first[0]

    @property
    def all(self) -> list[str]:
        """All addresses: given ones, then told ones."""
        return list(dict.fromkeys([*self._first, *self._told]))

    @property
    def several(self) -> bool:
        """Whether there is another one to go to."""
        return len(self.all) > 1

    def told(self, addresses: Sequence[str]) -> None:
        """Take over what a coordinator has said of its group, or what was kept of that."""
        origins = (origin_for(self.given, text) for text in addresses[:MOST_ADDRESSES] if len(text) <= LONGEST_ADDRESS)
        known = list(dict.fromkeys(origin for origin in origins if origin is not None and self.allowed(origin)))
        if known and known != self._told:
            self._told = known
            self.changed(known)

    def read(self, header: str | None) -> None:
        """As ``told``, of an answer's header."""
        if header is not None and header != self._header:
            self._header = header
            self.told(addresses_of(header))

    def is_silent(self, address: str) -> bool:
        """Whether this one has not answered a moment ago."""
        return time.monotonic() < self._silent.get(address, 0.0)

    def note_silent(self, address: str) -> None:
        """This one does not answer: others come first for a while, and no redirect to it is followed."""
        self._silent[address] = time.monotonic() + GONE_SECONDS

    def move_on(self) -> None:
        """Make the next address the current one, of those that have not been silent a moment ago if there are any."""
        known = self.all
        at = known.index(self.current) if self.current in known else -1
        following = [*known[at + 1 :], *known[: at + 1]]
        self.current = next((address for address in following if not self.is_silent(address)), following[0])
