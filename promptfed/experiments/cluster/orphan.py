"""The coordinator that a killed command has left running: the next command on the same folder ends it.

A coordinator locks its data folder and writes its process id into the lock file. A process is taken for the orphan only
if the lock is held, and if its command line names this folder: another process may have got the number since.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import note
from promptfed.shared import machine

LOCK_FILE = "lock"
MODULE = "promptfed.coordinator"
END_SECONDS = 8.0  # after SIGTERM, and again after SIGKILL
LOOK_SECONDS = 0.05


def end_orphan(data_dir: Path) -> bool:
    """End the coordinator that works on ``data_dir``, if it is one of this machine; whether there was one.

    Call it only while no other command uses the folder.

    Raises:
        CommandError: it does not end.
    """
    lock = data_dir / LOCK_FILE
    pid = _holder(lock)
    if pid is None or not _serves(pid, data_dir):
        return False
    note(f"the coordinator of an earlier command, process {pid}, is ended")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            if _holder(lock) is None:
                return True
            time.sleep(LOOK_SECONDS)
    raise CommandError(f"the coordinator of an earlier command does not end: end process {pid}", Exit.FAILED)


def _holder(lock: Path) -> int | None:
    """The process id in a lock file; None if nobody holds the lock, or no id is written."""
    try:
        with lock.open("r+") as file:
            if not machine.try_lock(file.fileno()):
                text = file.read().strip()
                return int(text) if text.isdecimal() else None
    except OSError:
        pass  # There is no such folder yet.
    return None


def _serves(pid: int, data_dir: Path) -> bool:
    """Whether a process is a coordinator on ``data_dir``, by its command line."""
    file = Path(f"/proc/{pid}/cmdline")
    if file.parent.parent.joinpath("self").exists():
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return False
    else:
        asked = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        words = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()  # noqa: S603
    return MODULE in words and f"--data-dir={data_dir}" in words
