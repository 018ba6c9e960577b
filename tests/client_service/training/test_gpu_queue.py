"""Tasks on one GPU begin when its memory has room for them; the GPU here is a number of bytes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promptfed.client_service.training import gpu_queue
from promptfed.client_service.training.gpu_queue import CONTEXT_BYTES, GpuQueue, gpu_turn
from promptfed.shared.methods.core.training import TaskCancelled
from tests.support.waiting import PATIENCE, wait_for

GIB = 1 << 30
TOTAL = 10 * GIB


@dataclass
class Memory:
    """A process's tensors on a device of ``TOTAL`` bytes."""

    weights: int = GIB - CONTEXT_BYTES
    peaks: int = 0
    released: int = 0
    watched: list[str] = field(default_factory=list)

    def total(self) -> int:
        return TOTAL

    def held(self) -> int:
        return self.weights

    def watch(self) -> None:
        self.peaks = self.weights

    def peak(self) -> int:
        return self.peaks

    def release(self) -> None:
        self.released += 1


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_queue, "POLL_SECONDS", 0.01)


@pytest.fixture
def process(tmp_path: Path) -> Callable[[int], GpuQueue]:
    """A process whose tasks of the kind "train" are known to take so many GiB."""

    def make(gib: int) -> GpuQueue:
        return GpuQueue(tmp_path, Memory(), {"train": gib * GIB} if gib else {})

    return make


def test_tasks_begin_in_order_as_long_as_there_is_room(process: Callable[[int], GpuQueue]) -> None:
    """Weights take 1 GiB in each of four processes, which leaves 6 for tasks."""
    queues = [process(gib) for gib in (3, 3, 2, 1)]
    tickets = [queue.enter("train") for queue in queues]

    def begun() -> list[bool]:
        return [queue.admits(ticket, "train") for queue, ticket in zip(queues, tickets, strict=True)]

    assert begun() == [True, True, False, False]  # the last one would fit, and does not overtake
    tickets[0].close()
    assert [queue.admits(ticket, "train") for queue, ticket in zip(queues[1:], tickets[1:], strict=True)] == [True] * 3


def test_a_task_of_unknown_size_is_alone_and_measured(process: Callable[[int], GpuQueue]) -> None:
    first, second = process(0), process(2)
    memory = first.memory
    assert isinstance(memory, Memory)
    with first.turn("train", never):
        memory.peaks += 4 * GIB
        waiting = second.enter("train")
        assert not second.admits(waiting, "train")
    assert memory.released == 1  # for the one that waits
    assert second.admits(waiting, "train")
    assert first.enter("train").need == int(4 * GIB * gpu_queue.SPARE)
    assert first.enter("evaluate").need == TOTAL


def test_one_that_needs_more_than_there_is_runs_alone(process: Callable[[int], GpuQueue]) -> None:
    large, small = process(40), process(1)
    before, after = large.enter("train"), small.enter("train")
    assert large.admits(before, "train")
    assert not small.admits(after, "train")


def test_nobody_waits_for_a_process_that_was_killed(tmp_path: Path, process: Callable[[int], GpuQueue]) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from promptfed.client_service.training.gpu_queue import Ticket\n"
        f"kept = [Ticket(pathlib.Path(sys.argv[1]), kind, {TOTAL}) for kind in '01']\n"
        "print('in line', flush=True); sys.stdin.read(); os._exit(1)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in line\n"
        queue = process(1)
        ticket = queue.enter("train")
        assert not queue.admits(ticket, "train")
        other.kill()
        other.wait(PATIENCE)
    assert queue.admits(ticket, "train")
    assert len(list(tmp_path.glob("1-*"))) == 1


def test_a_cancelled_client_leaves_the_line(tmp_path: Path, process: Callable[[int], GpuQueue]) -> None:
    busy, other = process(9), process(9)
    with busy.turn("train", never), pytest.raises(TaskCancelled), other.turn("train", lambda: True):
        pytest.fail("it has no turn")
    assert not list(tmp_path.glob("1-*"))


def test_a_turn_within_a_turn_does_not_wait(process: Callable[[int], GpuQueue]) -> None:
    queue = process(0)
    with queue.turn("train", never), queue.turn("features", never):
        pass


def test_threads_of_one_process_take_turns(process: Callable[[int], GpuQueue]) -> None:
    """Of four tasks of 3 GiB, three at once have room beside the weights."""
    queue, now, most, lock = process(3), [0], [0], threading.Lock()
    enough = threading.Barrier(3, timeout=PATIENCE)

    def work(number: int) -> None:
        with queue.turn("train", never):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            if number < 3:
                enough.wait()
            with lock:
                now[0] -= 1

    with ExitStack() as stack:
        for number in range(3):
            threads = threading.Thread(target=work, args=(number,))
            threads.start()
            stack.callback(threads.join)
    work(3)
    assert most == [3]


def test_work_begins_when_the_line_moves(process: Callable[[int], GpuQueue]) -> None:
    first, second, order = process(9), process(9), []

    def wait() -> None:
        with second.turn("train", never):
            order.append("second")

    with first.turn("train", never):
        thread = threading.Thread(target=wait)
        thread.start()
        wait_for("the second ticket", lambda: len(list(first.folder.glob("1-*"))) == 2)
        order.append("first")
    thread.join(PATIENCE)
    assert order == ["first", "second"]


def test_a_cpu_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> Any:
        raise AssertionError("no queue is needed")

    monkeypatch.setattr(gpu_queue, "queue_of", refuse)
    backbone: Any = SimpleNamespace(device=torch.device("cpu"))
    with gpu_turn(backbone, "train", never):
        pass
