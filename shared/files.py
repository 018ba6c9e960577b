"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from promptfed.shared import machine

_NOT_A_FILE = "it is a pipe, a socket or a device, not a file"


def write_whole(path: Path, content: bytes, *, mode: int | None = None, synced: bool = True) -> None:
    """Write so that a reader finds all of ``content``, or what was there before.

    Args:
        path: of the file.
        content: its bytes.
        mode: its permissions from the first moment on; else as the process makes files.
        synced: whether it stands a power cut once this returns.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | machine.O_CLOEXEC, 0o666 if mode is None else mode
    )
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                machine.set_mode(file.fileno(), mode)
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if synced:
        machine.sync_folder(path.parent)


class NotAFile(OSError):
    """A pipe, a socket or a device where a file should be: reading it could block for ever."""


def open_file(path: Path) -> BinaryIO:
    """Open an ordinary file for reading. It never blocks on other kinds of files.

    Raises:
        NotAFile: it is a pipe, a socket, a device or a folder.
        OSError: as `open` does.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: that alone can move a device
        raise NotAFile(_NOT_A_FILE)
    # What has taken the file's place since is not waited for either.
    file = os.fdopen(os.open(path, os.O_RDONLY | machine.O_NONBLOCK | machine.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFile(_NOT_A_FILE)
    return file


def special_files(root: Path) -> Iterator[Path]:
    """Pipes, sockets and devices anywhere under a folder, in no order."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from special_files(Path(entry.path))
            elif not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):  # else a dead link
                yield Path(entry.path)
