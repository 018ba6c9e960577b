"""``python -m tests.support.windows_like ARGUMENTS``: a client whose machine has nothing of POSIX for promptfed.

promptfed's own modules find no ``fcntl``, ``resource``, ``pwd``, ``grp`` or ``termios``; ``os`` and ``signal`` lack
what Windows lacks, and event loops take no signal handlers. A ``msvcrt`` locks bytes, as the one of Windows does.
"""

from __future__ import annotations

import asyncio
import builtins
import fcntl
import importlib
import os
import signal
import sys
from types import ModuleType
from typing import Any

ABSENT = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")
OF_OS = ("fork", "geteuid", "getuid", "fchmod", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "killpg")
OF_SIGNAL = ("SIGHUP", "SIGKILL")


def lock_bytes(handle: int, mode: int, count: int) -> None:
    """``msvcrt.locking`` in its mode LK_NBLCK, at the file's position."""
    assert mode == 2
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)


def hide() -> None:
    """Take POSIX away from modules of promptfed that are imported from now on."""
    msvcrt = ModuleType("msvcrt")
    vars(msvcrt).update(locking=lock_bytes, LK_NBLCK=2)
    sys.modules["msvcrt"] = msvcrt
    find, find_by_name = builtins.__import__, importlib.import_module

    def refuse(name: str, importer: Any) -> None:
        if name in ABSENT and str((importer or {}).get("__name__", "")).startswith("promptfed"):
            raise ImportError(f"there is no {name} on this machine")

    def found(name: str, importer: Any = None, *others: Any) -> Any:
        refuse(name, importer)
        return find(name, importer, *others)

    def found_by_name(name: str, package: str | None = None) -> ModuleType:
        refuse(name, sys._getframe(1).f_globals)
        return find_by_name(name, package)

    def take_no_handler(*_: Any) -> None:
        raise NotImplementedError

    builtins.__import__, importlib.import_module = found, found_by_name
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            delattr(module, name)
    asyncio.SelectorEventLoop.add_signal_handler = take_no_handler


if __name__ == "__main__":
    # Libraries may use all of the machine: those that look at it when they are imported are imported before.
    import httpx  # noqa: F401
    import open_clip  # noqa: F401
    import uvicorn  # noqa: F401

    hide()
    from promptfed.client_service.__main__ import main
    from promptfed.shared.service.streams import leave

    leave(main())
