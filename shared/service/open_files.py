"""How many open files this process may have, and how many connections of clients they are enough for."""

from __future__ import annotations

import contextlib
import resource

ENOUGH_FILES = 65_536  # where the system names no limit
KEPT_FILES = 400  # for the database's connections, blobs, uploads and the process itself
HOW_TO_RAISE = "raise it: ulimit -n, LimitNOFILE= of the systemd unit, or ulimits of the container"


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it have: the usual 1,024 do not do for 1,000 clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _wanted(hard)), hard))


def open_files() -> int:
    """The limit on open files that `raise_open_files` reaches."""
    return _wanted(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def most_connections() -> int:
    """How many connections leave enough open files for everything else."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH_FILES if files == resource.RLIM_INFINITY else connections_of(files)


def connections_of(files: int) -> int:
    """How many connections a coordinator accepts with so many open files: each client has one."""
    return max(files - KEPT_FILES, files // 2)


def _wanted(hard: int) -> int:
    # Where nothing is the limit (macOS says so), the kernel still has one, and refuses to be asked for more.
    return ENOUGH_FILES if hard == resource.RLIM_INFINITY else hard
