"""Cases of `benchmarks.coordinator_load` with Flower's in-memory server, which runs in a separate Python with flwr."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLIENTS = {"flower": "own-clients", "flower_lean": "lean-clients"}
"""The kinds of Flower clients, by the name of their cases in the results: see ``benchmarks/flower/server.py``."""
ROUNDS = {10: 20, 100: 5, 1000: 2}
SHAPES = {1: (1, 256), 32: (16, 512), 5120: (64, 20480)}  # KB: m and d_t of the float32 context that every update holds
MOST_KILOBYTES = 32  # only small updates are compared
MOST_OWN_CLIENTS = 100  # a thousand in one process did not end two rounds within five minutes
WANTED = "flwr>=1.41,<1.43"
SCRIPT = Path(__file__).parent / "server.py"
WHOLE_SECONDS = 300.0


def compares(name: str, kilobytes: int, clients: int) -> bool:
    """Whether a case is measured with this kind of Flower clients."""
    return kilobytes <= MOST_KILOBYTES and (name != "flower" or clients <= MOST_OWN_CLIENTS)


@contextlib.contextmanager
def own_python(wanted: str = WANTED, made: str | None = None) -> Iterator[str]:
    """Make a virtual environment with ``wanted`` for a block; its Python.

    ``made``: the Python of one that exists already.
    """
    if made is not None:
        yield made
        return
    with tempfile.TemporaryDirectory(prefix="promptfed-flower-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        print(f"installing {wanted} for this run", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "-q", wanted], check=True)  # noqa: S603 (ourselves)
        yield python


def measure(python: str, name: str, kilobytes: int, clients: int) -> dict[str, Any]:
    """A case with the figures of ``coordinator_load.measure`` but latencies: Flower does not answer updates."""
    rounds, shape = ROUNDS[clients], SHAPES[kilobytes]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = [str(port), str(clients)]
    sizes = [str(number) for number in shape]
    server = _start(python, "server", *address, str(rounds), *sizes)
    players = None
    try:
        _wait_for(server, port)
        players = _start(python, CLIENTS[name], *address, *sizes)
        output, _ = server.communicate(timeout=WHOLE_SECONDS)
        if server.returncode or players.wait(WHOLE_SECONDS):
            raise SystemExit(f"Flower's run with {clients} clients failed: {server.returncode}, {players.returncode}")
    finally:
        for process in (server, players):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    numbers = json.loads(output.splitlines()[-1])
    updates = rounds * clients
    return {
        "flwr": numbers["flwr"],
        "kilobytes": kilobytes,
        "clients": clients,
        "updates": updates,
        "updates_per_second": updates / sum(numbers["seconds"]),
        "whole_run_updates_per_second": updates / numbers["whole_seconds"],
        "cpu_ms_per_update": numbers["cpu_seconds"] / updates * 1e3,
        "idle_mb": numbers["idle_mb"],
        "peak_mb": numbers["peak_mb"],
    }


def _start(python: str, *arguments: str) -> subprocess.Popen[str]:
    command = [python, str(SCRIPT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603


def _wait_for(server: subprocess.Popen[str], port: int) -> None:
    end = time.monotonic() + WHOLE_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("Flower's server does not start: is flwr 1.41 or 1.42 installed there?")
