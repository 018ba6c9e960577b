"""Torch's settings belong to tasks: on a GPU the kernels and the precision that a spec asks for, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promptfed.client_service.training import kernels
from promptfed.client_service.training.kernels import torch_settings
from promptfed.shared.spec.spec import TrainingSpec
from tests.support.durable import Second
from tests.support.waiting import PATIENCE

GPU: Any = SimpleNamespace(device=torch.device("cuda"))


def task(**training: Any) -> Any:
    """A task on a GPU."""
    return SimpleNamespace(training=TrainingSpec(**training), backbone=GPU, phase="train", cancelled=lambda: False)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    kept = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(kept[0])
    torch.set_float32_matmul_precision(kept[1])
    torch.backends.cudnn.allow_tf32 = kept[2]
    assert not torch.are_deterministic_algorithms_enabled()


def test_kernels_are_switched_by_one_task_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    switch, said = kernels._Deterministic(), []

    def task() -> None:
        with switch.on():
            pass

    second = Second(task)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: said.append(on) or second.inside())
    task()
    assert second.end()
    assert said in ([True, False] * 2, [True, False]), (
        "the second came after the first, or beside it, never into a switch"
    )


def test_overlapping_tasks_have_deterministic_kernels_until_the_last_one_ends() -> None:
    asked, begun, end = task(deterministic=True), threading.Event(), threading.Event()

    def other() -> None:
        with torch_settings(asked):
            begun.set()
            end.wait(PATIENCE)

    thread = threading.Thread(target=other)
    with torch_settings(asked):
        thread.start()
        assert begun.wait(PATIENCE)
    assert torch.are_deterministic_algorithms_enabled()  # the other one still runs
    with torch_settings(task()):
        assert torch.are_deterministic_algorithms_enabled()
    end.set()
    thread.join()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), torch_settings(asked):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_are_exact_unless_the_spec_permits_tf32() -> None:
    for permitted, name in ((True, "high"), (False, "highest")):
        with torch_settings(task(tf32=permitted)):
            assert torch.get_float32_matmul_precision() == name
            assert torch.backends.cudnn.allow_tf32 is permitted


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_has_as_many_threads_as_the_spec_says(threads: int) -> None:
    torch.set_num_threads(3)
    with torch_settings(task(threads=threads)):
        assert torch.get_num_threads() == threads
