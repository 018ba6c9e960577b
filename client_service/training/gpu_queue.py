"""Clients that share a GPU are queued by memory, in one process or in several of the same user on one machine.

Each task has a ticket: a file in a folder of the GPU with the bytes that the task needs, locked by the task's process.
A task begins when its bytes and those of all tickets before it fit into the GPU, or if no task is before it. The bytes
are the measured peak of an earlier task of the same kind. The first task of a kind has the GPU to itself, so that it
can be measured. Each process has a further ticket for its weights, before all tasks. A ticket that nobody locks
belongs to a process that has ended.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from promptfed.shared import machine
from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.training import TaskCancelled

WEIGHTS, TASK = "0", "1"  # a ticket's name begins with its kind: weights come first
POLL_SECONDS = 0.2
USABLE = 0.95  # of a GPU's memory
SPARE = 1.1  # over a measured peak
CONTEXT_BYTES = 512 << 20  # of CUDA in each process

log = logging.getLogger("promptfed.client")
_numbers = itertools.count()


class DeviceMemory(Protocol):
    """What a queue asks of a device, in bytes."""

    def total(self) -> int:
        """All memory that processes can use."""

    def held(self) -> int:
        """This process's tensors."""

    def watch(self) -> None:
        """Begin to look for the peak."""

    def peak(self) -> int:
        """The most that this process's tensors took since `watch`."""

    def release(self) -> None:
        """Give the memory that no tensor uses to other processes."""


@dataclass(frozen=True)
class CudaMemory:
    """The memory of a CUDA device as torch tells it."""

    device: torch.device

    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory * USABLE)

    def held(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def watch(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def release(self) -> None:
        torch.cuda.empty_cache()


class Ticket:
    """A place in the line of ``folder``; the caller has locked the folder."""

    def __init__(self, folder: Path, kind: str, need: int):
        self.path = folder / f"{kind}-{time.time_ns():020d}-{os.getpid()}-{next(_numbers)}"
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | machine.O_CLOEXEC, 0o600)
        machine.try_lock(self._handle)
        self.need = -1
        self.write(need)

    def write(self, need: int) -> None:
        """Say how many bytes are needed."""
        if need != self.need:
            self.need = need
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, f"{need:020d}".encode())

    def close(self) -> None:
        """Leave the line."""
        os.close(self._handle)
        with contextlib.suppress(OSError):
            self.path.unlink()


@dataclass
class GpuQueue:
    """The line of one device, as one process sees it."""

    folder: Path
    memory: DeviceMemory
    _peaks: dict[Hashable, int] = field(default_factory=dict)  # of tasks beyond the weights, by their kind
    _weights: Ticket | None = None
    _turns: threading.local = field(default_factory=threading.local)

    @contextmanager
    def turn(self, kind: Hashable, cancelled: Callable[[], bool]) -> Iterator[None]:
        """A block that computes on the device: a task of a ``kind``. It begins at once within another of this thread.

        Raises:
            TaskCancelled: ``cancelled`` became true while it waited.
        """
        if getattr(self._turns, "mine", False):
            yield
            return
        ticket = self.enter(kind)
        try:
            self._wait(ticket, kind, cancelled)
            unknown = kind not in self._peaks
            before = self.memory.held()
            if unknown:
                self.memory.watch()
            self._turns.mine = True
            yield
            if unknown:
                self._peaks[kind] = int((self.memory.peak() - before) * SPARE)
        finally:
            self._turns.mine = False
            self._leave(ticket)

    def enter(self, kind: Hashable) -> Ticket:
        """Join the line with a task of a ``kind``."""
        with self._locked():
            if self._weights is None:
                self._weights = Ticket(self.folder, WEIGHTS, self.memory.held() + CONTEXT_BYTES)
            return Ticket(self.folder, TASK, self._need(kind))

    def admits(self, ticket: Ticket, kind: Hashable) -> bool:
        """Whether the task of a ticket may begin."""
        with self._locked():
            ticket.write(self._need(kind))
            tasks, total = 0, ticket.need
            for path in self._line():
                if path == ticket.path:
                    break
                need = _need_of(path)
                total += need or 0
                tasks += need is not None and path.name.startswith(TASK)
        return not tasks or total <= self.memory.total()

    def _leave(self, ticket: Ticket) -> None:
        with self._locked():
            ticket.close()
            assert self._weights is not None
            others = [path for path in self._line() if path != self._weights.path and _need_of(path) is not None]
        if others:
            self.memory.release()

    def _line(self) -> list[Path]:
        return sorted(self.folder.glob(f"[{WEIGHTS}{TASK}]-*"))

    def _need(self, kind: Hashable) -> int:
        return self._peaks.get(kind, self.memory.total())

    def _wait(self, ticket: Ticket, kind: Hashable, cancelled: Callable[[], bool]) -> None:
        told = False
        while not self.admits(ticket, kind):
            if not told:
                log.info("other clients use the GPU: waiting until %d MiB are free", ticket.need >> 20)
                told = True
            if cancelled():
                raise TaskCancelled
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = machine.open_to_lock(self.folder)
        try:
            machine.lock(handle)
            yield
        finally:
            os.close(handle)


def _need_of(path: Path) -> int | None:
    """The bytes of a ticket; None for one of a process that has ended, which is removed."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(path, os.O_RDWR | machine.O_CLOEXEC)
        try:
            if not machine.try_lock(handle):
                return int(os.read(handle, 20))
        finally:
            os.close(handle)
        path.unlink()
    return None


@cache
def queue_of(device: torch.device) -> GpuQueue:
    """The process's view of a CUDA device's line; processes see the same one whatever number the device has there."""
    line = Path(tempfile.gettempdir()) / f"promptfed-{getpass.getuser()}"
    return GpuQueue(line / f"gpu-{torch.cuda.get_device_properties(device).uuid}", CudaMemory(device))


def gpu_turn(backbone: Backbone, kind: Hashable, cancelled: Callable[[], bool]) -> AbstractContextManager[None]:
    """A block that computes with a backbone: on a GPU it waits for its turn. Raises as `GpuQueue.turn`."""
    if backbone.device.type != "cuda":
        return nullcontext()
    return queue_of(backbone.device).turn(kind, cancelled)
