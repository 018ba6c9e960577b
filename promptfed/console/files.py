"""Files and folders that commands read and write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.methods.core.default_backbone import data_in
from promptfed.shared.service.reasons import why


def read_federation(path: Path) -> dict[str, Any]:
    """The spec in a file, also in a run file, whose clients and clock are left out. Raises PromptfedError."""
    return read_federation_and_data(path)[0]


def read_federation_and_data(path: Path) -> tuple[dict[str, Any], list[str]]:
    """As `read_federation`, and the URIs of a run file's clients."""
    from promptfed.shared.service.yaml_text import read_mapping

    raw = read_mapping(path)
    return {key: value for key, value in raw.items() if key not in ("clients", "clock")}, data_in(raw.get("clients"))


def expect_new(path: Path | None, option: str = "--out") -> None:
    """Raise PromptfedError if ``option`` names a file that is there already, or a folder that is not."""
    if path is not None and path.exists():
        raise BadInput(f"{path} is there already: give {option} a new file")
    if path is not None and not path.parent.is_dir():
        raise BadInput(f"{path.parent} is no folder: make it, or give {option} another place")


def expect_suffix(path: Path | None, suffix: str, what: str) -> None:
    """Raise PromptfedError if --out names a file of another kind than ``what``, which ends in ``suffix``."""
    if path is not None and path.suffix.lower() not in ("", suffix):
        raise BadInput(f"--out {path}: {what} is written there: give a name that ends in {suffix}")


def write_private(path: Path, text: str) -> None:
    """Write a secret so that only its owner can read it."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {why(error)}") from None


def write_file(path: Path, body: bytes) -> None:
    """Write bytes. Raises PromptfedError if the file cannot be written."""
    try:
        path.write_bytes(body)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {why(error)}") from None


def full_disk(place: Path, then: str = "") -> PromptfedError:
    """The error of a full disk below ``place``. ``then``: what else to do than to take another temporary folder."""
    return BadInput(f"the disk of {place} is full: free some space, {then or 'or set TMPDIR'}")


@contextmanager
def new_folder(path: Path | None, option: str = "") -> Iterator[Path]:
    """A context manager for ``path``, which must be new or empty, or for a temporary folder if ``path`` is None.

    ``option`` is the command-line option that named the folder, for the error text.

    Raises:
        PromptfedError: the folder cannot be used.
    """
    if path is None:
        with tempfile.TemporaryDirectory(prefix="promptfed-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            where = f"{option} " if option else ""
            raise BadInput(f"{path} is not empty: give {where}a new folder")
    except OSError as error:
        raise BadInput(f"cannot use {path}: {why(error)}") from None
    yield path
