"""A coordinator for tests: a real server on a free port, in a thread of this process or as a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from promptfed.coordinator.app import create_app
from promptfed.coordinator.server import Server, _bind, _config
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.fault_points import VARIABLE
from promptfed.testing.clients import PATIENCE, bearer
from promptfed.testing.coordinator import LocalCoordinator, OperatorCalls, RealCoordinator
from tests.support import forked_coordinator, once

TIMEOUT = httpx.Timeout(PATIENCE)


class AnswerCheck:
    """Checks each answer against the coordinator's own description: a status that it does not name is an error."""

    def __init__(self, schema: dict[str, Any]):
        self._paths = [
            (re.compile(re.sub(r"\{[^}]+\}", "[^/]+", path) + "$"), verbs) for path, verbs in schema["paths"].items()
        ]

    def __call__(self, response: httpx.Response) -> None:
        request = response.request
        for pattern, verbs in self._paths:
            operation = verbs.get(request.method.lower())
            if operation is not None and pattern.match(request.url.path):
                self._check(operation["responses"], response)
                return
        known = request.url.path == "/openapi.json" or response.status_code in (404, 405)
        assert known, "an address or verb that is not described"

    def _check(self, described: dict[str, Any], response: httpx.Response) -> None:
        found = described.get(str(response.status_code))
        assert found is not None, f"{response.request.url.path} does not describe {response.status_code}"
        if response.status_code >= 400 and response.request.method != "HEAD":  # whose answers have no body
            kind = str(json.loads(response.read())["type"]).rsplit("/", 1)[-1]
            assert f"`{kind}`" in found["description"], f"{response.request.url.path} does not describe {kind}"


@cache
def answer_check() -> AnswerCheck:
    """The check, made once: making the description takes longer than most tests."""
    return AnswerCheck(create_app(Settings()).openapi())


class InProcess(LocalCoordinator):
    """A coordinator behind FastAPI's TestClient, whose answers are checked against its description."""

    def __init__(self, folder: Path, **options: Any):
        once.share()
        super().__init__(folder, **options)
        self.http.event_hooks = {"response": [answer_check()]}


@contextmanager
def in_process(folder: Path, **options: Any) -> Iterator[InProcess]:
    """A coordinator in this process for the length of a block."""
    server = InProcess(folder, **options)
    try:
        yield server
    finally:
        server.stop()


class InThread(RealCoordinator):
    """A server in a thread on a real socket, for tests of what only a network shows."""

    def __init__(self, folder: Path, **options: Any):
        once.share()
        super().__init__(folder, **({"port": 0} | options))

    def serve(self) -> httpx.Client:
        listening = _bind(self.settings)
        started = threading.Event()
        self._server = Server(_config(self.settings, self.app), self.app, started.set)
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()
        if not started.wait(PATIENCE):
            raise AssertionError("the coordinator does not start")
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        hooks: dict[str, list[Callable[..., Any]]] = {"response": [answer_check()]}
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, verify=False, event_hooks=hooks)

    def stop(self) -> None:
        """As on SIGTERM."""
        if not self._thread.is_alive():
            return
        self.http.close()
        self._server.handle_exit(15, None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


Make = Callable[..., InThread]
"""Makes coordinators with settings of their own: the fixture ``coordinator_with``."""


@contextmanager
def in_thread(folder: Path, **options: Any) -> Iterator[InThread]:
    """A server in a thread for the length of a block."""
    server = InThread(folder, **options)
    try:
        yield server
    finally:
        server.stop()


class CoordinatorProcess(OperatorCalls):
    """A server as a process of its own, which can be killed and started again on the same folder.

    ``files``: where its log and its URL are written, with suffixes; beside the folder unless given.
    """

    def __init__(self, folder: Path, *options: str, fault: str = "", files: Path | None = None):
        self.folder = folder
        self._options = options
        self._log = (files or folder).with_suffix(".log")
        self._port_file = (files or folder).with_suffix(".url")
        self.start(fault)

    def start(self, fault: str = "") -> None:
        """Start, and wait until it answers or has died."""
        self._port_file.unlink(missing_ok=True)
        arguments = ["--data-dir", str(self.folder), "--port", "0", "--port-file", str(self._port_file)]
        self._spawn([*arguments, *self._options], fault)
        end = time.monotonic() + PATIENCE
        while not self._port_file.exists() and not self.dead:
            assert time.monotonic() < end, self.log()
            time.sleep(0.01)
        self.url = self._port_file.read_text().strip() if self._port_file.exists() else "http://127.0.0.1:1"
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT)
        token = self.folder / "operator.token"
        self.operator = bearer(token.read_text().strip()) if token.exists() else {}

    def _spawn(self, arguments: list[str], fault: str) -> None:
        command = [sys.executable, "-m", "promptfed.coordinator", *arguments]
        with self._log.open("ab") as log:
            environment = {**os.environ, VARIABLE: fault}
            self._process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(seconds)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a power cut."""
        if not self.dead:
            self.signal(signal.SIGKILL)
        self.wait()
        self.http.close()

    def log(self) -> str:
        """Everything that it has said."""
        return self._log.read_text()


_server = multiprocessing.get_context("forkserver")
IMPORTED = ["promptfed.coordinator.server", "tests.support.forked_coordinator", "promptfed.client_service.worker"]


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported what services take long to import."""
    _server.set_forkserver_preload(IMPORTED)
    return _server


class ForkedCoordinator(CoordinatorProcess):
    """The same from a process that has imported everything already: a start takes a moment, not seconds.

    One thread may start it again while another looks for a moment to kill it.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        fault: str = "",
        files: Path | None = None,
        constants: dict[str, float] | None = None,
        environment: dict[str, str] | None = None,
    ):
        self._turn = threading.RLock()
        self._environment = environment or {}
        self._constants = constants or {}
        super().__init__(folder, *options, fault=fault, files=files)

    def _spawn(self, arguments: list[str], fault: str) -> None:
        child = fork_server().Process(
            target=forked_coordinator.run, args=(arguments, fault, str(self._log), self._constants, self._environment)
        )
        with self._turn:
            child.start()
            self._child = child

    @property
    def dead(self) -> bool:
        # An exit code can be read once only: of two threads that read it, one would be told of a broken pipe.
        with self._turn:
            return self._child.exitcode is not None

    @property
    def pid(self) -> int:
        with self._turn:
            assert self._child.pid is not None
            return self._child.pid

    def wait(self, seconds: float = PATIENCE) -> int:
        end = time.monotonic() + seconds
        while not self.dead:
            assert time.monotonic() < end, "it does not end"
            time.sleep(0.002)
        with self._turn:
            assert self._child.exitcode is not None
            return self._child.exitcode

    def signal(self, number: int) -> None:
        with self._turn:
            if not self.dead:
                with contextlib.suppress(ProcessLookupError):  # It may have died at this very moment.
                    os.kill(self.pid, number)
