"""``python -m promptfed.client_service.starter``: forks clients of one machine, which then import nothing themselves.

Requests and answers are lines of JSON. ``{"arguments": [...], "log": PATH, "environment": {...}}`` starts a client and
is answered by its process id, ``{"ended": ID}`` by its exit code, as `subprocess` has it, or null while it runs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from promptfed.client_service.__main__ import main
from promptfed.shared.service.reasons import collect_seldom
from promptfed.shared.service.streams import leave, standard_streams


def serve() -> None:
    """Answer requests until the input ends. No thread is started here: a fork would lack it."""
    standard_streams()
    collect_seldom()
    from promptfed.client_service import worker as worker  # for the clients, as the command imports it

    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        answer: int | None = None
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _be_client(**request)
        os.write(1, f"{json.dumps(answer)}\n".encode())


def _be_client(arguments: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    """Be a client with a session, a log and an environment of its own, to its end."""
    code: Any = 1
    try:
        os.setsid()
        os.environ.update(environment)
        names = [part.removeprefix("--name=") for part in arguments if part.startswith("--name=")]
        Path("/proc/self/comm").write_text("".join(names)[:15])  # what `ps` and `top` show
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for handle, place in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(handle, place)
            os.set_inheritable(place, True)
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    leave(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
