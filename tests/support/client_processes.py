"""Real client processes, and the fake coordinator behind a real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from tests.support.waiting import PATIENCE


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of ``app`` on a free port of loopback."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


class ClientProcess:
    """``python -m promptfed.client_service`` with its own state folder under ``folder``."""

    module = "promptfed.client_service"

    def __init__(self, folder: Path, *flags: str, **options: str):
        self.state_dir = folder / "state"
        self.log = folder / "client.log"
        folder.mkdir(parents=True, exist_ok=True)
        given = {"state-dir": str(self.state_dir), "device": "cpu", "give-up-after": "60"}
        given |= {key.replace("_", "-"): value for key, value in options.items()}
        self._arguments = [f"--{key}={value}" for key, value in given.items()] + list(flags)
        self.start()

    def start(self) -> None:
        """Start, or start again with the same command."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self._arguments], stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )  # fmt: skip

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def stop(self) -> None:
        """Leave nothing running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def api(self, verb: str, path: str, **request: object) -> httpx.Response:
        """Call its own API."""
        url = (self.state_dir / "api.url").read_text()
        return httpx.request(verb, url + path, trust_env=False, timeout=PATIENCE, **request)

    def stage(self) -> str | None:
        """Where it says it is; None while its API does not answer."""
        try:
            return str(self.api("GET", "/status").json()["stage"])
        except (OSError, httpx.HTTPError):
            return None
