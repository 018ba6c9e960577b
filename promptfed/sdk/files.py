"""Files that the operator names; errors are raised as CommandError with one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.service.reasons import why


def read_spec(path: Path) -> dict[str, Any]:
    """Read the unresolved spec in a YAML or JSON file.

    Raises:
        CommandError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    import yaml

    from promptfed.shared.service.yaml_text import read_yaml

    try:
        raw = read_yaml(path.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {why(error)}", Exit.BAD_INPUT) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} is not YAML: {why(error)}", Exit.BAD_INPUT) from None
    if not isinstance(raw, dict):
        raise CommandError(f"{path} must hold a mapping, such as `name: eyes`", Exit.BAD_INPUT)
    return raw


def read_federation(path: Path) -> dict[str, Any]:
    """The spec in a file, also in a run file, whose clients and clock are left out. Raises CommandError."""
    return {key: value for key, value in read_spec(path).items() if key not in ("clients", "clock")}


def expect_new(path: Path | None, option: str = "--out") -> None:
    """Raise CommandError if ``option`` names a file that is there already, or a folder that is not."""
    if path is not None and path.exists():
        raise CommandError(f"{path} is there already: give {option} a new file", Exit.BAD_INPUT)
    if path is not None and not path.parent.is_dir():
        raise CommandError(f"{path.parent} is no folder: make it, or give {option} another place", Exit.BAD_INPUT)


def write_private(path: Path, text: str) -> None:
    """Write a secret so that only its owner can read it."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {why(error)}", Exit.BAD_INPUT) from None


def write_file(path: Path, body: bytes) -> None:
    """Write bytes. Raises CommandError if the file cannot be written."""
    try:
        path.write_bytes(body)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {why(error)}", Exit.BAD_INPUT) from None


def full_disk(place: Path, then: str = "") -> CommandError:
    """The error of a full disk below ``place``. ``then``: what else to do than to take another temporary folder."""
    return CommandError(f"the disk of {place} is full: free some space, {then or 'or set TMPDIR'}", Exit.BAD_INPUT)


@contextmanager
def new_folder(path: Path | None, option: str = "") -> Iterator[Path]:
    """A context manager for ``path``, which must be new or empty, or for a temporary folder if ``path`` is None.

    ``option`` is the command-line option that named the folder, for the error text.

    Raises:
        CommandError: the folder cannot be used.
    """
    if path is None:
        with tempfile.TemporaryDirectory(prefix="promptfed-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            where = f"{option} " if option else ""
            raise CommandError(f"{path} is not empty: give {where}a new folder", Exit.BAD_INPUT)
    except OSError as error:
        raise CommandError(f"cannot use {path}: {why(error)}", Exit.BAD_INPUT) from None
    yield path
