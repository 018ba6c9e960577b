"""`promptfed` or `python` in forks of one process that has imported what each would import for seconds.

A fork has the arguments, environment, folder and streams of whoever called it, who is sent its exit code and passes
signals on. One of `python` takes promptfed from where its caller's `PYTHONPATH` says. That a command starts by itself
is tested in `tests/test_wheel.py`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

# A shell calls the interpreter, whose path may have a space: of a "#!" line the kernel makes one argument.
CALLER = """#!/bin/sh
'''exec' {python} -IS "$0" "$@"
' '''
import json, os, signal, socket, sys
passed = signal.SIGTERM, signal.SIGINT
signal.pthread_sigmask(signal.SIG_BLOCK, passed)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(given).to_bytes(4)], [0, 1, 2])
server.sendall(given)
command = int.from_bytes(server.recv(4, socket.MSG_WAITALL))
for number in passed:
    signal.signal(number, lambda number, frame: os.kill(command, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
code = int.from_bytes(server.recv(4, socket.MSG_WAITALL), signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def warm_commands(folder: Path, name: Literal["promptfed", "python"] = "promptfed") -> Iterator[Path]:
    """A folder for `PATH` with the command."""
    from tests.support.waiting import wait_for  # which imports promptfed

    short = tempfile.TemporaryDirectory()  # A socket's path has a hundred characters at most
    address, command = Path(short.name) / "socket", folder / name
    command.write_text(CALLER.format(python=shlex.quote(sys.executable), address=str(address)))
    command.chmod(0o755)
    few_threads = os.environ | {"OMP_NUM_THREADS": "1"}  # as pages are run: several commands at once
    server = subprocess.Popen([sys.executable, "-m", __name__, str(address), name], env=few_threads)
    try:
        wait_for("the warm process", address.exists)
        yield folder
    finally:
        server.kill()
        server.wait()
        short.cleanup()


def interpret() -> None:
    """What `python` does with its arguments: a module, a text or a file. It ends as `promptfed` does, at once."""
    how, *rest = sys.argv[1:]
    del sys.modules["tests"], sys.modules["tests.docs"]
    sys.path[0] = str(Path(how).resolve().parent) if how not in ("-m", "-c") else ""
    sys.path[1:1] = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    code: Any = 0
    try:
        if how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [how, *rest]
            runpy.run_path(how, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(int(code or 0))


def serve(address: str, name: str) -> None:
    """Fork for each caller."""
    import open_clip  # noqa: F401
    import torch  # noqa: F401

    command: Callable[[], Any] = interpret
    if name == "promptfed":
        from promptfed.cli.main import command

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address + ".new")
    listening.listen()
    os.rename(address + ".new", address)
    while True:
        caller, _ = listening.accept()
        if os.fork():
            caller.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        head, streams, *_ = socket.recv_fds(caller, 4, 3)
        arguments, environment, cwd = json.loads(caller.recv(int.from_bytes(head), socket.MSG_WAITALL))
        if process := os.fork():
            caller.sendall(process.to_bytes(4))
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            caller.sendall(code.to_bytes(4, signed=True))
            os._exit(0)
        caller.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = arguments
        command()


if __name__ == "__main__":
    serve(*sys.argv[1:])
