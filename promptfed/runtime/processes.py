"""Local processes of one command, which starts, watches and stops them and restarts each at most three times.

An exit code of 2 to 127 means that a service ended on purpose and stated the reason; it is not restarted. After exit
code 1 (an error) or death by a signal it is restarted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

MAX_RESTARTS = 3
SIGNALLED = 128  # and above: the code that a shell or a container reports for death by a signal


class ProcessFailed(RuntimeError):
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


@dataclass
class Managed:
    """One started process: its command, its log and its number of restarts."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.start_again()

    def ended(self) -> int | None:
        """The exit code; negative after a signal."""
        return self.process.poll()

    def start_again(self) -> None:
        """Start the command; its output is appended to the log."""
        # The process gets its own session: Ctrl-C reaches only this command, which ends its processes in order.
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

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, arguments: list[str]) -> Managed:
        """Start ``python arguments...`` under ``name``."""
        command = [sys.executable, *arguments]
        with interrupts_wait():  # a running process that is not recorded would outlive this one
            self.running[name] = Managed(name, command, self.folder / f"{name}.log", self.environment)
        return self.running[name]

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
