"""Local processes of one command, each restarted at most three times; a federation in processes, with new tokens."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, Self

from promptfed.console.files import full_disk, write_private
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.shared.errors import Failed
from promptfed.shared.messages import Role

MAX_RESTARTS = 3
SIGNALLED = 128  # and above: the code that a shell or a container reports for death by a signal
CLIENT = ["-m", "promptfed.client_service"]
START_SECONDS = 300.0  # limit for a process that hangs; a process that ends is noticed at once
LEAST_ROOM = 64 << 10  # bytes without which no service can go on
ENROL_SECONDS = 300.0
ENROL_SECONDS_EACH = 20.0  # a client computes for seconds when it starts, and many start at once
POLL_SECONDS = 0.1
OPERATOR_FILE = "operator.token"
COORDINATOR_FOLDER = "coordinator"


class ProcessFailed(Failed):
    """A service ended and is not restarted; the text holds its last lines."""


class Service(Protocol):
    """A running process or container."""

    name: str
    restarts: int

    def ended(self) -> int | None:
        """The exit code; None while it runs."""

    def start_again(self) -> None:
        """Start it again with the same command."""

    def tail(self, lines: int) -> str:
        """The last lines of its log."""


def revive(services: Iterable[Service]) -> list[str]:
    """Restart the services that died; returns their names. A service that ended with 0 is done.

    Raises:
        ProcessFailed: a service ended on purpose, or died more than ``MAX_RESTARTS`` times.
    """
    revived = []
    for service in services:
        code = service.ended()
        if code is None or code == 0:
            continue
        if 1 < code < SIGNALLED:
            raise ProcessFailed(f"{service.name} ended with {code}: {service.tail(1)}")
        if service.restarts == MAX_RESTARTS:
            text = f"{service.name} ended with {code} for the {MAX_RESTARTS + 1}th time; its log ends:"
            raise ProcessFailed(f"{text}\n{service.tail(5)}")
        service.restarts += 1
        service.start_again()
        revived.append(service.name)
    return revived


class Starter:
    """A process that imports what clients import, once, and forks them (`promptfed.client_service.starter`)."""

    def __init__(self, log: Path):
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "promptfed.client_service.starter"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def ask(self, **request: Any) -> Any:
        """The answer to a request. Raises OSError or ValueError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with interrupts_wait():  # the next request would be given this one's answer
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it; its clients go on."""
        self._process.kill()
        self._process.communicate()


class Forked:
    """A process that a starter has forked, with what is used of `subprocess.Popen`."""

    def __init__(self, starter: Starter, **request: Any):
        self._starter = starter
        self.pid: int = starter.ask(**request)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs. Without its starter nobody could tell: then it is killed."""
        if self.returncode is None:
            try:
                self.returncode = self._starter.ask(ended=self.pid)
            except (OSError, ValueError):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired as `subprocess.Popen.wait`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS / 5)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@dataclass
class Managed:
    """One started process: its command, its log and its number of restarts. ``starter`` forks it, if possible."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    starter: Starter | None = None
    process: subprocess.Popen[bytes] | Forked = field(init=False)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.start_again()

    def ended(self) -> int | None:
        """The exit code; negative after a signal."""
        return self.process.poll()

    def start_again(self) -> None:
        """Start the command; its output is appended to the log."""
        # The process gets its own session: Ctrl-C reaches only this command, which ends its processes in order.
        if self.starter is not None and self.command[1:3] == CLIENT:
            options = {"arguments": self.command[3:], "log": str(self.log), "environment": self.environment}
            with suppress(OSError, ValueError):
                self.process = Forked(self.starter, **options)
                return
        with self.log.open("ab") as output, interrupts_wait():
            self.process = subprocess.Popen(  # noqa: S603 (our own interpreter and modules)
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        text = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(text[-lines:])


@dataclass
class Processes:
    """Starts processes with their logs in ``folder`` and stops all of them at the end of a ``with`` block."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    stop_seconds: float = 8.0
    running: dict[str, Managed] = field(default_factory=dict)
    starter: Starter | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, arguments: list[str]) -> Managed:
        """Start ``python arguments...`` under ``name``."""
        command = [sys.executable, *arguments]
        with interrupts_wait():  # a running process that is not recorded would outlive this one
            log = self.folder / f"{name}.log"
            self.running[name] = Managed(name, command, log, self.environment, self.starter)
        return self.running[name]

    def fork_clients(self) -> None:
        """Fork clients from one process that has imported all they need, where the system can."""
        if sys.platform == "linux":
            with interrupts_wait():
                self.starter = Starter(self.folder / "starter.log")

    def watch(self) -> list[str]:
        """Restart the processes that died; returns their names. Raises ProcessFailed as `revive` does."""
        return revive(self.running.values())

    def stop(self) -> None:
        """Ask all processes to end, and kill those that have not ended after a few seconds."""
        alive = [managed.process for managed in self.running.values() if managed.process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_seconds
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.starter is not None:
            self.starter.close()


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that its child processes are stopped too."""

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, raise_interrupt)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block. Works only in the main thread, where Python handles signals.

    It changes the handlers and not the mask of blocked signals, since child processes would inherit the mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    changed = [number for number, handler in handlers.items() if callable(handler)]
    for number in changed:
        signal.signal(number, lambda signum, _: came.append(signum))
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, handlers[number])
        if came:
            signal.raise_signal(came[0])


@dataclass(frozen=True)
class Site:
    """One client: its name, its data URI, its role (trainer or evaluator) and further test sets by name.

    ``domain`` describes its images in words; None: the description of the data. ``floor``: its disclosure floor in a
    simulation; None: the usual one.
    """

    name: str
    data: str
    role: Role = "trainer"
    tests: Mapping[str, str] = field(default_factory=dict)
    domain: str | None = None
    floor: int | None = None

    def uris(self) -> list[tuple[str, Role | Literal["tests"]]]:
        """The data URIs, each with the role for which the data are opened."""
        return [(self.data, self.role), *((uri, "tests") for uri in self.tests.values())]


class Services(ABC):
    """A started coordinator at ``api``, and the clients that are started for it.

    ``permitted`` names backbones outside open_clip's registry that the data owners allow.
    """

    api: Coordinator
    permitted: Sequence[str] = ()
    operator_token: Path | None = None  # its path, if users can read it here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.close()

    @abstractmethod
    def hand_out(self, token: str) -> None:
        """Write the enrolment token where clients read it."""

    @abstractmethod
    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        """Start one client on the CPU or on the named GPU."""

    @abstractmethod
    def watch(self) -> list[str]:
        """Restart the services that died; returns their names. Raises ProcessFailed as `revive` does."""

    def create(self, spec: operations.Spec, initial_state: bytes | None = None) -> str:
        """Create a federation and return its id. ``initial_state`` is a safetensors body, made with a backbone."""
        return str(self.api.run(operations.create(spec, initial_state)).json["id"])

    def enrol(
        self, federation: str, sites: Sequence[Site], progress: Callable[[int], None], gpus: Sequence[str] = ()
    ) -> None:
        """Start the clients of ``sites`` and wait until all have enrolled; ``progress`` receives the number enrolled.

        ``gpus`` are assigned in turn; without GPUs clients compute on the CPU.

        Raises:
            PromptfedError: the clients did not enrol in time.
            ProcessFailed: a client ended.
        """
        self.hand_out(self.api.send(operations.mint_token(federation, len(sites))).view.token)
        for number, site in enumerate(sites):
            self.start_client(federation, site, gpus[number % len(gpus)] if gpus else None)
        seconds = ENROL_SECONDS + ENROL_SECONDS_EACH * len(sites)
        deadline = time.monotonic() + seconds
        while True:
            pages = self.api.run(operations.list_clients(federation))
            enrolled = sum(len(page.json["clients"]) for page in pages)
            progress(enrolled)
            if enrolled == len(sites):
                return
            if time.monotonic() > deadline:
                text = f"only {enrolled} of {len(sites)} clients enrolled in {seconds:.0f} s: look at the logs"
                raise Failed(f"{text} with --keep FOLDER")
            self.watch()
            time.sleep(POLL_SECONDS)


class LocalFederation(Services):
    """Processes under ``folder``, started through ``processes``; ``port`` is the coordinator's port (0: any free port).

    ``options`` are further options of the coordinator, such as ``--host`` with a certificate.
    """

    def __init__(self, processes: Processes, folder: Path, port: int = 0, options: Sequence[str] = ()):
        self.processes = processes
        self.folder = folder
        self.api = self._start_coordinator(port, options)
        self.operator_token = folder / COORDINATOR_FOLDER / OPERATOR_FILE

    def hand_out(self, token: str) -> None:
        """Write the token beside the clients' folders."""
        write_private(self._token_file, token)

    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        """Start a client's process; ``gpu`` is a torch device, such as ``cuda:1``."""
        options = {
            "coordinator": self.api.url,
            "federation": federation,
            "enrolment-token-file": str(self._token_file),
            "state-dir": str(self.folder / f"client-{site.name}"),
            "ledger": str(self.folder / "ledgers" / f"{site.name}.jsonl"),  # never the user's own folder
            "device": gpu or "cpu",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        arguments += client_options(site, self.permitted)
        self.processes.start(f"client-{site.name}", [*CLIENT, *arguments])

    def watch(self) -> list[str]:
        """Restart those of ``processes`` that died. Raises PromptfedError where the disk is full: they would wait."""
        if shutil.disk_usage(self.folder).free < LEAST_ROOM:
            raise full_disk(self.folder)
        return self.processes.watch()

    @property
    def _token_file(self) -> Path:
        return self.folder / "enrolment.token"

    def _start_coordinator(self, port: int, options: Sequence[str]) -> Coordinator:
        data_dir, port_file = self.folder / COORDINATOR_FOLDER, self.folder / "coordinator.url"
        # Its own database, even if the environment names the database of another coordinator.
        arguments = ["-m", "promptfed.coordinator", f"--data-dir={data_dir}", "--database-url=", "--host=127.0.0.1"]
        port_file.unlink(missing_ok=True)  # left by an earlier process in the same folder
        arguments += [f"--port={port}", f"--port-file={port_file}", *options]
        managed = self.processes.start("coordinator", arguments)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise Failed(f"the coordinator did not start in {START_SECONDS:.0f} s")
            self.processes.watch()
            time.sleep(POLL_SECONDS)
        url = port_file.read_text().strip()
        # After a restart the coordinator must have the address that the clients know.
        port = int(url.rsplit(":", 1)[1])
        managed.command = [f"--port={port}" if part == "--port=0" else part for part in managed.command]
        token = (data_dir / OPERATOR_FILE).read_text().strip()
        return Coordinator(url, token, meanwhile=self.processes.watch)


def client_options(site: Site, permitted: Sequence[str]) -> list[str]:
    """The client options for its identity and its permissions."""
    tests = [f"--test={name}={uri}" for name, uri in site.tests.items()]
    backbones = [f"--allow-backbone={name}" for name in permitted]
    words = [f"--domain={site.domain}"] if site.domain is not None else []
    return [f"--name={site.name}", f"--role={site.role}", f"--data={site.data}", *words, *tests, *backbones]
