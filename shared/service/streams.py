"""A process's standard streams and its end: what cannot be written never ends the work.

A service manager, cron or ``pythonw`` gives no streams, a reader such as ``head`` goes away, a disk is full.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from promptfed.shared.service.reasons import Exit, why

NAMES = ("stdin", "stdout", "stderr")


class Standard(io.FileIO):
    """A standard stream whose writes do not fail: what nobody reads or no disk takes is dropped.

    ``refused``: why a disk did not take a write.
    """

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write ``data`` (an interruption may leave some of it for the next write), or drop it."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for whatever else writes there
            os.close(nowhere)
        except OSError as error:
            self.refused = self.refused or error
        return memoryview(data).nbytes


def standard_streams() -> None:
    """Open streams that were not given, and let none fail. What an encoding lacks is written as its code.

    To be called before files are opened: one of them would take the number of a stream that was not given.
    """
    for name in NAMES:
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and name != "stdin":
            stream.reconfigure(errors="backslashreplace")
            if type(_raw(stream)) is io.FileIO:  # no console of Windows
                stream.flush()
                standard = Standard(stream.fileno(), "w", closefd=False)
                buffer = standard if stream.buffer is _raw(stream) else io.BufferedWriter(standard)
                lines, through = stream.line_buffering, stream.write_through
                setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, None, lines, through))


def _raw(stream: Any) -> object:
    """What writes at the end, without a buffer."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def delivered(code: int) -> int:
    """The exit code of a process that would end with ``code``: another one where a disk did not take its output."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = _raw(sys.stdout)
    if code or not isinstance(raw, Standard) or raw.refused is None:
        return code
    sys.stderr.write(f"promptfed: the output cannot be written: {why(raw.refused)}\n")
    sys.stderr.flush()
    return Exit.BAD_INPUT


def leave(code: int) -> NoReturn:
    """End the process without shutting down the interpreter, for which torch takes seconds on a busy machine.

    What is on disk survives a kill at any instant, so nothing is lost.
    """
    logging.shutdown()
    os._exit(delivered(code))


def as_process(main: Callable[[], int]) -> NoReturn:
    """Be the process whose exit code ``main`` returns."""
    standard_streams()
    try:
        code = main()
    except SystemExit as end:  # of --help
        code = int(end.code or 0)
    leave(code)
