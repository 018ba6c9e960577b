"""Copies to and from a device that this machine lacks, recordings of steps, and arrays of both libraries."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.shared import tensors
from promptfed.shared.tensors import arrays, transfer
from promptfed.shared.tensors.lazy import _Lazy, no_grad
from promptfed.shared.tensors.replay import LEAST_REPLAYS, WARM_UP, Operations, Replayed
from tests.support.recording_device import recording

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("mps")


class Sent:
    """A tensor whose ways are noted."""

    def __init__(self, nbytes: int = 8, device: torch.device = CPU, pinned: bool = False) -> None:
        self.nbytes, self.device, self.pinned = nbytes, device, pinned
        self.ways: list[Any] = []

    def is_pinned(self) -> bool:
        return self.pinned

    def contiguous(self) -> Sent:
        self.ways.append("contiguous")
        return self

    def pin_memory(self) -> Sent:
        self.ways.append("pinned")
        return self

    def to(self, *place: Any, non_blocking: bool = False) -> Sent:
        self.ways.append((*place, non_blocking))
        return self

    def cpu(self) -> Sent:
        return self

    def record_stream(self, stream: Any) -> None:
        self.ways.append(f"kept for {stream.name}")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to streams of a GPU."""
    said: list[str] = []

    class Stream:
        def __init__(self, device: Any, name: str = "own") -> None:
            self.name = name
            said.append(f"made {name}")

        def wait_stream(self, other: Any) -> None:
            said.append(f"{self.name} waits for {other.name}")

    class Event:
        record = staticmethod(lambda stream: said.append(f"recorded on {stream.name}"))
        synchronize = staticmethod(lambda: said.append("waited"))

    @contextmanager
    def inside(given: Stream) -> Any:
        said.append(f"in {given.name}")
        yield

    usual = Stream(GPU, "usual")
    said.clear()
    for name, value in (("Stream", Stream), ("Event", Event), ("stream", inside)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(transfer, "_streams", {})
    return said


@pytest.mark.parametrize(("tensor", "device", "dtype", "ways"), [
    (Sent(), CPU, None, [(CPU, None, False)]), (Sent(device=GPU), GPU, torch.half, [(GPU, torch.half, False)]),
    (Sent(), GPU, None, ["contiguous", "pinned", (GPU, True)]),
    (Sent(pinned=True), GPU, torch.half, [(GPU, True), (torch.half, False)]),
    (Sent(transfer.LARGE - 1, pinned=True), GPU, None, [(GPU, True)]),
    (Sent(transfer.LARGE, pinned=True), GPU, None, [(GPU, True), "kept for usual"]),
    (Sent(transfer.LARGE, pinned=True), OTHER, None, [(OTHER, True)]),
])  # fmt: skip
def test_a_copy_to_a_device_is_not_waited_for(
    stream: list[str], tensor: Sent, device: torch.device, dtype: Any, ways: list[Any]
) -> None:
    transfer.sent_to(tensor, device, dtype)
    assert tensor.ways == ways
    beside = "kept for usual" in ways
    assert stream == (["made own", "in own", "usual waits for own"] if beside else [])
    if beside:
        transfer.sent_to(Sent(transfer.LARGE, pinned=True), device)
        assert stream.count("made own") == 1


def test_a_copy_back_is_waited_for_where_it_is_read(stream: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    far = Sent(device=GPU)
    read = transfer.read_later(far)
    assert (far.ways, stream) == ([("cpu", True)], ["recorded on usual"])
    assert read() is far
    assert stream[1:] == ["waited"]
    near = torch.ones(1)
    assert transfer.read_later(near)() is near
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: asked.append(pin_memory))
    for device in (CPU, OTHER, GPU):
        transfer.host_memory((1,), torch.float32, device)
    assert asked == [False, False, True]


class Stepped(torch.optim.SGD):
    """Has the flag of fused optimizers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__([{"params": [weight], "capturable": False}], lr=0.5)


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize(("size", "count", "recorded"), [
    (2, WARM_UP + LEAST_REPLAYS, 1), (2, WARM_UP + LEAST_REPLAYS - 1, 0), (3, 99, 0),
])  # fmt: skip
def test_steps_are_recorded_where_enough_of_them_follow(
    monkeypatch: pytest.MonkeyPatch, collects: bool, size: int, count: int, recorded: int
) -> None:
    graphs, weight, seen = recording(monkeypatch), torch.zeros(3, requires_grad=True), []
    optimizer = Stepped(weight)

    def step(indices: torch.Tensor) -> torch.Tensor:
        loss = (weight * indices.float().sum()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append((optimizer.param_groups[0]["capturable"], gc.isenabled()))
        return loss.detach()

    replayed = Replayed(step, optimizer, CPU, 2, count)
    if not collects:
        gc.disable()
    try:
        for number in range(6):
            replayed(torch.arange(number, number + size))
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert len(graphs) == recorded
    usual = (False, collects)
    assert seen == ([usual] * WARM_UP + [(True, False)] if recorded else [usual] * 6)
    total = sum(range(6)) * size + 6 * sum(range(size))
    assert weight.tolist() == [-0.5 * total] * 3
    assert optimizer.param_groups[0]["capturable"] is False


def test_steps_that_differ_or_fail_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording(monkeypatch)
    weight = torch.zeros(2, requires_grad=True)
    turns = [0]

    def differing(indices: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        return weight.sum() + turns[0] if turns[0] % 2 else weight.sum() * 2

    def reading(indices: torch.Tensor) -> torch.Tensor:
        return weight.sum() * float(weight.sum().item())

    for step, reason in (
        (differing, "operations are not the same"),
        (reading, "not permitted when stream is capturing"),
    ):
        replayed = Replayed(step, Stepped(weight), CPU, 2, 99)
        for _ in range(WARM_UP + 2):
            replayed(torch.arange(2))
        assert replayed._eager
        assert reason in caplog.text


@pytest.mark.parametrize(("made", "given", "found"), [
    (lambda a: arrays.softmax(a, 1), [[0.0, 0.0], [1.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]),
    (lambda a: arrays.softmax(a * 1000, 0), [[0.0, 2.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]),
    (arrays.relu, [[-1.0, 2.0]], [[0.0, 2.0]]), (arrays.lengths, [[3.0, 4.0], [0.0, 0.0]], [5.0, 0.0]),
    (lambda a: arrays.argsort(a, 1), [[2.0, 1.0, 1.0]], [[1, 2, 0]]), (arrays.argsort, [[2.0], [1.0]], [[1], [0]]),
    (arrays.cholesky, [[4.0, 0.0], [0.0, 9.0]], [[2.0, 0.0], [0.0, 3.0]]),
    (arrays.cholesky, [[1.0, 2.0], [2.0, 1.0]], None),
    (lambda a: arrays.take_along(a, a.argsort(1), 1), [[2.0, 1.0]], [[1.0, 2.0]]), (arrays.double, [[1.0]], [[1.0]]),
])  # fmt: skip
def test_arrays_of_both_libraries_agree(made: Callable[[Any], Any], given: list[Any], found: Any) -> None:
    for array in (np.array(given), torch.tensor(given, dtype=torch.float64)):
        result = made(array)
        assert (result is None) == (found is None)
        if found is not None:
            assert np.allclose(np.asarray(result), np.array(found))
            assert arrays.namespace(result) is arrays.namespace(array)
    copy = arrays.copied(array := np.zeros(1))
    copy += 1
    assert (array[0], arrays.single(array).dtype, arrays.double(arrays.single(array)).dtype) == (0, "f4", "f8")
    assert arrays.in_namespace(np, array) is array
    assert arrays.in_namespace(torch, array).data_ptr() == array.ctypes.data


def test_errors_bytes_and_lazy_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    error = pickle.loads(pickle.dumps(tensors.TensorError("kind", "text")))
    assert (error.kind, str(error)) == ("kind", "text")
    state = {"a": np.array([1.0, 2.0], dtype=np.float32)}
    usual = tensors.state_hash(state)
    monkeypatch.setattr(tensors, "sys", SimpleNamespace(byteorder="big"))
    assert tensors.state_hash({"a": state["a"].byteswap()}) == usual
    with pytest.raises(ValueError, match="the dtype F8_E4M3 is not supported"):
        tensors._dtype("F8_E4M3")
    lazy: Any = _Lazy("math")
    assert (list(vars(lazy)), lazy.pi, list(vars(lazy))) == (["_name"], np.pi, ["_name", "pi"])

    @no_grad
    def enabled() -> bool:
        return torch.is_grad_enabled()

    assert (enabled(), torch.is_grad_enabled()) == (False, True)


def test_operations_are_noted_with_what_they_hold() -> None:
    """A number of the CPU's is held by the operation; what else lies there works on the host."""

    def noted(work: Callable[[], Any], device: torch.device = CPU) -> Operations:
        with Operations(device) as found:
            work()
        return found

    ones, far = torch.ones(2, 3), torch.ones(2, device="meta")
    assert noted(lambda: ones + 1).noted == noted(lambda: ones * 5 + 1).noted[1:]
    assert noted(lambda: ones + 1).noted != noted(lambda: ones + 2).noted
    assert noted(lambda: ones + 1).noted != noted(lambda: ones.T + 1).noted
    assert noted(lambda: torch.cat([ones, ones])).noted != noted(lambda: torch.cat([ones])).noted
    assert noted(lambda: ones + float("nan")).noted == noted(lambda: ones + float("nan")).noted
    meta = torch.device("meta")
    assert [noted(lambda value=value: far * value, meta).elsewhere for value in (2, torch.tensor(2.0))] == [None, None]
    assert noted(lambda: far * torch.tensor(2.0), meta).noted != noted(lambda: far * torch.tensor(3.0), meta).noted
    found = noted(lambda: (ones + 1, ones * 2), meta)
    assert found.elsewhere == "aten.add.Tensor", "the first"
