"""`promptfed` in forks of one process that has imported what each command would import for seconds.

A fork has the arguments, environment, folder and streams of whoever called it, who is sent its exit code and passes
signals on. That a command starts by itself is tested in `tests/test_wheel.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import wait_for

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
def warm_commands(folder: Path) -> Iterator[Path]:
    """A folder for `PATH` with the command."""
    short = tempfile.TemporaryDirectory()  # A socket's path has a hundred characters at most
    address, command = Path(short.name) / "socket", folder / "promptfed"
    command.write_text(CALLER.format(python=shlex.quote(sys.executable), address=str(address)))
    command.chmod(0o755)
    few_threads = os.environ | {"OMP_NUM_THREADS": "1"}  # as pages are run: several commands at once
    server = subprocess.Popen([sys.executable, "-m", __name__, str(address)], env=few_threads)
    try:
        wait_for("the warm process", address.exists)
        yield folder
    finally:
        server.kill()
        server.wait()
        short.cleanup()


def serve(address: str) -> None:
    """Fork for each caller."""
    import open_clip  # noqa: F401
    import torch  # noqa: F401

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
    serve(sys.argv[1])
