"""What differs between operating systems: locks, folders' entries, permissions, limits. No other module asks for these.

POSIX has ``fcntl`` and ``resource``. Windows has ``msvcrt``, no limit on open files to raise, and no folder that could
be opened or synced: there a rename is on the disk with the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

O_CLOEXEC = getattr(os, "O_CLOEXEC", getattr(os, "O_NOINHERIT", 0)) | getattr(os, "O_BINARY", 0)
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
LOCKED_BYTE = 0x7FFF_FFFE  # Windows locks bytes: one that lies behind any content, so that others can read the file
RETRY_SECONDS = 0.05
UNLIMITED = 1 << 62  # open files
ARENAS = 2
_M_ARENA_MAX = -8  # <malloc.h>


def _found(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _msvcrt, _resource = _found("fcntl"), _found("msvcrt"), _found("resource")


def boot_time() -> float:
    """Seconds that also pass while the machine sleeps, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def lock(handle: int) -> None:
    """Wait until no other process has the file, and hold it until ``handle`` is closed."""
    if _fcntl is not None:
        _fcntl.flock(handle, _fcntl.LOCK_EX)
        return
    while not try_lock(handle):
        time.sleep(RETRY_SECONDS)


def try_lock(handle: int) -> bool:
    """Hold the file until ``handle`` is closed; False where another process has it."""
    try:
        if _fcntl is not None:
            _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        elif _msvcrt is not None:
            place = os.lseek(handle, 0, os.SEEK_CUR)
            os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
            try:
                _msvcrt.locking(handle, _msvcrt.LK_NBLCK, 1)
            finally:
                os.lseek(handle, place, os.SEEK_SET)
    except OSError:
        return False
    return True


def open_to_lock(folder: Path) -> int:
    """A handle by which a folder can be locked; on Windows that of a file in it."""
    if _fcntl is not None:
        return os.open(folder, os.O_RDONLY | O_CLOEXEC)
    return os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | O_CLOEXEC, 0o600)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    if _fcntl is None:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_mode(handle: int, mode: int) -> None:
    """Set an open file's permissions. On Windows the folder's hold."""
    if hasattr(os, "fchmod"):
        os.fchmod(handle, mode)


def user_cache(name: str) -> Path:
    """The user's folder for what can be made again, which `own_folder` makes. Raises RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "promptfed" / name


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone, whatever the umask."""
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)


def own_folder(path: Path) -> Path:
    """A folder whose name is ours, closed to others: it is made, or is this user's already.

    Raises:
        OSError: it cannot be made, or what is there is a link or another user's, and not ours to read or tidy.
    """
    make_folder(path)
    expect_own(path)
    if stat.S_IMODE(path.lstat().st_mode) != 0o700:
        path.chmod(0o700)
    return path


def expect_own(path: Path) -> None:
    """Raise OSError where ``path`` is a link or another user's: it may hold, or lead to, what others have put there."""
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        raise OSError(f"{path} is a link; put what it leads to there, or remove it")
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to another user; remove it, or name another place")


def file_limits() -> tuple[int, int] | None:
    """How many files this process may open, now and at most; None where the system has no such limit."""
    if _resource is None:
        return None
    soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    unlimited = _resource.RLIM_INFINITY
    return (UNLIMITED if soft == unlimited else soft), (UNLIMITED if hard == unlimited else hard)


def raise_file_limit(to: int) -> None:
    """Allow this process ``to`` open files, if the system does."""
    if _resource is not None:
        with contextlib.suppress(ValueError, OSError):
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (to, _resource.getrlimit(_resource.RLIMIT_NOFILE)[1]))


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_memory(size: int) -> None:
    """Refuse this process more than ``size`` bytes of address space, if the system can."""
    if _resource is not None:
        with contextlib.suppress(ValueError, OSError):
            _resource.setrlimit(_resource.RLIMIT_AS, (size, size))


def on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[int], Any]) -> None:
    """Call ``stop`` with the number of the signal that is to end this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop, number)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda received, _: loop.call_soon_threadsafe(stop, received))


async def line_of(stream: TextIO) -> str:
    """A line of a terminal or a pipe, which a signal can interrupt; empty at its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        if not ready.done():
            ready.set_result(stream.readline())

    try:
        loop.add_reader(stream.fileno(), read)
    except NotImplementedError:  # Windows: the thread is left behind where a signal comes first
        return await asyncio.to_thread(stream.readline)
    try:
        return await ready
    finally:
        loop.remove_reader(stream.fileno())


def share_heaps() -> None:
    """Let all threads allocate from two heaps, where the C library is glibc and its variable does not say otherwise.

    By itself glibc has eight a core. Requests go from thread to thread, so that each heap keeps what a burst of them
    once needed: with 1,000 clients the process grew by 170 MB in 200 rounds without holding more than at the start.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and others have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return to the system what the C library holds free, also in the middle of its heaps, where it is glibc.

    By itself glibc returns only what is free at a heap's end. A hundred thousand refused updates, of which nothing is
    kept, left 15 MB of free pieces between what was in use.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
