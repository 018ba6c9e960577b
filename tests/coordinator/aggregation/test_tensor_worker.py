"""The tensor worker: a process of its own, whose death fails one computation."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from promptfed.coordinator.aggregation import server_half, tensor_worker
from promptfed.coordinator.aggregation.server_half import call_in_worker
from promptfed.coordinator.aggregation.tensor_worker import TensorWorker, WorkerDied, serve
from promptfed.shared.tensors import TensorError
from tests.coordinator.aggregation.test_numpy_and_torch import assert_close, context_of, federation_of


@pytest.fixture
def worker() -> Iterator[TensorWorker]:
    made = TensorWorker()
    yield made
    made.stop()


def refuse() -> None:
    raise TensorError("wrong-shape", "another shape is expected")


class CannotTravel(Exception):
    def __init__(self, first: str, second: str):
        super().__init__(f"{first} {second}")


def refuse_strangely() -> None:
    raise CannotTravel("one", "two")


def test_what_a_function_raises_is_raised_here(worker: TensorWorker) -> None:
    pid = worker.run(os.getpid)
    assert pid != os.getpid()
    with pytest.raises(TensorError, match="another shape") as caught:
        worker.run(refuse)
    assert caught.value.kind == "wrong-shape"
    assert "in refuse\n" in "".join(caught.value.__notes__), "the traceback travels too"
    with pytest.raises(RuntimeError, match="CannotTravel: one two") as strange:
        worker.run(refuse_strangely)
    assert "in refuse_strangely\n" in "".join(strange.value.__notes__)
    assert worker.run(os.getpid) == pid, "an error ends no process"


def test_a_process_that_dies_fails_the_computation_and_the_next_starts_another(worker: TensorWorker) -> None:
    first = worker.run(os.getpid)
    with pytest.raises(WorkerDied, match="memory"):
        worker.run(os._exit, 1)
    assert worker.run(os.getpid) != first


class OnlyThere:
    """Can be sent, and not be read here."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return read_there, (os.getpid(),)


def read_there(pid: int) -> None:
    if os.getpid() != pid:
        raise AttributeError("cannot be read here")


def test_an_answer_that_cannot_be_read_leaves_nothing_in_the_pipe(worker: TensorWorker) -> None:
    with pytest.raises(AttributeError, match="cannot be read here"):
        worker.run(OnlyThere)
    assert worker.run(max, 2, 3) == 3


def test_a_process_that_has_ended_for_want_of_work_is_started_again(worker: TensorWorker) -> None:
    first = worker.run(os.getpid)
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert worker.run(os.getpid) != first


def test_it_ends_where_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_worker, "IDLE_SECONDS", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as jobs, os.fdopen(writing, "wb") as sender:
        answers = io.BytesIO()
        sender.write(pickle.dumps((max, (2, 3))))
        sender.flush()
        serve(jobs, answers)
    assert pickle.loads(answers.getvalue()) == (True, 3)


def test_a_generator_of_prompts_is_computed_there_as_here(
    worker: TensorWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_of("pfedpg")
    context = context_of(federation)
    arguments = (context,)
    here = server_half.call_with_torch(federation.method, "initial_state", arguments, 1)
    there, _ = worker.run(call_in_worker, federation.spec.method, "initial_state", arguments, 1)
    assert_close(here, there)
    assert all(np.array_equal(here[name], there[name]) for name in here)
