"""The digests of the images that a client has trained on, in its state folder: `promptfed score` leaves these out.

The account's folder ``promptfed/trained/FEDERATION`` names the state folders of its clients, wherever they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import account_folder
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

FILE = "trained-images.txt"


def note_trained(folder: Path, federation: str, digests: Iterable[str]) -> None:
    """Add ``digests`` to those in a state ``folder``: an image that is gone was trained on all the same.

    Raises:
        ClientError: STATE where they cannot be written.
    """
    try:
        before = read_trained(folder) or set()
        everything = before.union(digests)
        if everything != before:
            write_whole(folder / FILE, "".join(f"{digest}\n" for digest in sorted(everything)).encode(), mode=0o600)
    except OSError as error:
        raise ClientError(Exit.STATE, f"{folder / FILE} cannot be written: {why(error)}") from None
    place = str(folder.absolute())
    with suppress(OSError):  # an account without a folder: --state-dir names it then
        named = _named(federation)
        named.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(named / hashlib.sha256(place.encode()).hexdigest()[:16], place.encode(), mode=0o600)


def read_trained(folder: Path) -> set[str] | None:
    """The digests in a state folder; None without a record. Raises OSError."""
    try:
        return set((folder / FILE).read_text().split())
    except FileNotFoundError:
        return None


def folders_of(federation: str) -> Sequence[Path]:
    """The state folders of this account's clients of a federation, by its id, as far as they are there."""
    named = _named(federation)
    places = [Path(file.read_text()) for file in sorted(named.iterdir())] if named.is_dir() else []
    return [place for place in places if (place / FILE).exists()]


def _named(federation: str) -> Path:
    return account_folder() / "trained" / federation
