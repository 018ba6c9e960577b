"""Ids for values of headers and names of files: keyed by a random secret, since plain hashes can be guessed."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from promptfed.shared.data.errors import DataError
from promptfed.shared.service.reasons import why

KEY_FILE = "key"
_KEY_BYTES = 32


def home(given: str | None) -> Path:
    """The folder of indexes: ``given`` by ``index=``, or one in the user's cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "promptfed" / "medical"


@contextmanager
def kept_in(folder: Path, uri: str) -> Iterator[None]:
    """Raise DataError where the index cannot be read or written."""
    try:
        yield
    except OSError as error:
        text = f"{uri}: the index cannot be kept in {folder}: {why(error)}; name a folder with index=FOLDER."
        raise DataError(text) from None


class Keys:
    """Ids under the secret in ``folder``, which is made where there is none."""

    def __init__(self, folder: Path, uri: str) -> None:
        with kept_in(folder, uri):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._key = _key(folder / KEY_FILE)

    def id(self, *text: object) -> str:
        """An id of 16 hexadecimal digits; the first of ``text`` says of what kind of thing."""
        whole = "\0".join(map(str, text)).encode(errors="surrogateescape")
        return hashlib.blake2b(whole, key=self._key, digest_size=8).hexdigest()


def _key(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    except FileExistsError:
        pass
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError("its file key is damaged: remove the folder")
    return key
