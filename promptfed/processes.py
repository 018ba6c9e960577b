"""Local processes that belong to one command: started, watched, restarted at most three times, and taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

MAX_RESTARTS = 3


class ProcessFailed(RuntimeError):
    """A process ended too often; the text holds the last lines of its log."""


@dataclass
class Managed:
    """One process of ours: its command, its log, how often it was started again."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    restarts: int = 0

    def tail(self, lines: int = 5) -> str:
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
        log = self.folder / f"{name}.log"
        command = [sys.executable, *arguments]
        managed = Managed(name, command, log, self._spawn(command, log))
        self.running[name] = managed
        return managed

    def watch(self) -> list[str]:
        """Start again what died; the names of those started again.

        A process that ended with 0 has done its work and is left alone.

        Raises:
            ProcessFailed: a process died more than three times.
        """
        revived = []
        for managed in self.running.values():
            code = managed.process.poll()
            if code is None or code == 0:
                continue
            if managed.restarts == MAX_RESTARTS:
                raise ProcessFailed(
                    f"{managed.name} ended with {code} for the {MAX_RESTARTS + 1}th time; its log {managed.log} ends:\n"
                    f"{managed.tail()}"
                )
            managed.restarts += 1
            managed.process = self._spawn(managed.command, managed.log)
            revived.append(managed.name)
        return revived

    def stop(self) -> None:
        """Ask all processes to end, and end those that have not after a few seconds."""
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

    def _spawn(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches only us, and we end our processes in order.
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 (our own interpreter and modules)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that what it started is stopped too."""

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, raise_interrupt)
