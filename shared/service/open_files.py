"""How many files, and so connections, a process may have open."""

from __future__ import annotations

from promptfed.shared import machine

ENOUGH_FILES = 65_536  # where the system names no limit
KEPT_FILES = 400  # for the database's connections, blobs, uploads and the process itself
HOW_TO_RAISE = "raise it: ulimit -n, LimitNOFILE= of the systemd unit, or ulimits of the container"


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it have: the usual 1,024 do not do for 1,000 clients."""
    if (limits := machine.file_limits()) is not None:
        machine.raise_file_limit(max(limits[0], open_files()))


def open_files() -> int:
    """The limit on open files that `raise_open_files` reaches."""
    limits = machine.file_limits()
    # Where nothing is the limit (macOS says so), the kernel still has one, and refuses to be asked for more.
    return ENOUGH_FILES if limits is None or limits[1] == machine.UNLIMITED else limits[1]


def most_connections() -> int:
    """How many connections leave enough open files for everything else."""
    limits = machine.file_limits()
    return ENOUGH_FILES if limits is None or limits[0] == machine.UNLIMITED else connections_of(limits[0])


def connections_of(files: int) -> int:
    """How many connections a coordinator accepts with so many open files: each client has one."""
    return max(files - KEPT_FILES, files // 2)
