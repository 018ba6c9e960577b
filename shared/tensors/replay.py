"""Steps of a task on a GPU, recorded once as a CUDA graph: each then takes one launch instead of some hundred.

A graph repeats what the device did, and nothing that Python would do otherwise in the next step. So a step is recorded
only if the two before it did the same operations, with the same numbers, on tensors of the device alone.
"""

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger("promptfed.training")

WARM_UP = 3  # steps before the recording: kernels are chosen in them, and memory is taken; the last two are compared
LEAST_REPLAYS = 8  # with fewer left a recording does not pay

_recording = threading.Lock()  # CUDA records one graph at a time in a process
_own = threading.local()  # each thread's streams that record, by device: a stream's workspaces stay for good
_told: set[str] = set()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a step, in order, each with what it was given and made: sizes, kinds and places, or numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[object, ...]] = []
        self.elsewhere: str | None = None  # the first operation on a tensor that is not on the device
        self._unset: list[Tensor] = []  # numbers without meaning; held, so that none takes their place
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if _attends(func) and not _dropout(func, args, kwargs or {}):  # then nothing sets or reads a seed
            self._unset.extend(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.ndim == 0)
        about: list[object] = [func]
        for values in (args, kwargs, made):
            self._note(func, values, about)
        self.noted.append(tuple(about))
        return made

    def _note(self, func: Any, value: object, about: list[object]) -> None:
        """Tensors by size, kind and place, what holds them by its length and all else as it is."""
        if isinstance(value, Tensor):
            about.append(self._about(func, value))
        elif isinstance(value, (tuple, list)):
            about.append(len(value))
            for each in value:
                self._note(func, each, about)
        elif isinstance(value, dict):
            about.extend(value)
            for each in value.values():
                self._note(func, each, about)
        elif isinstance(value, float):
            about.append(repr(value))  # so that NaN equals itself
        else:
            about.append(value if value is None or isinstance(value, (bool, int, str)) else type(value))

    def _about(self, func: Any, tensor: Tensor) -> object:
        if tensor.device.type != self._device.type:
            if any(tensor.data_ptr() == one.data_ptr() for one in self._unset):
                return tensor.dtype
            if tensor.ndim == 0 and tensor.device.type == "cpu":
                return tensor.item()  # a number, which the recorded operation holds
            self.elsewhere = self.elsewhere or str(func)
        return tensor.shape, tensor.stride(), tensor.dtype


@cache
def _attends(func: Any) -> bool:
    return "attention" in func.__name__


def _dropout(func: Any, args: Any, kwargs: Any) -> float:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return float(named.get("dropout_p", 0.0))


def _stream(device: torch.device) -> Any:
    """The stream on which this thread warms up and records."""
    streams: dict[torch.device, Any] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


class Replayed:
    """``step(indices (B,))`` for each batch of a task, which returns the loss; batches of ``size`` are replayed.

    ``count``: how many batches of that size there are. It lives as long as the task, and with it the graph.
    """

    def __init__(
        self, step: Callable[[Tensor], Tensor], optimizer: Optimizer, device: torch.device, size: int, count: int
    ):
        self._step, self._optimizer, self._size = step, optimizer, size
        self._device, self._stream = device, _stream(device)
        self._indices = torch.zeros(size, dtype=torch.int64, device=device)
        self._warm = 0  # steps
        self._before: list[Operations] = []
        self._graph: Any = None
        self._loss: Tensor | None = None
        self._eager = count < WARM_UP + LEAST_REPLAYS

    def __call__(self, indices: Tensor) -> Tensor:
        if self._eager or len(indices) != self._size:
            return self._step(indices)
        self._indices.copy_(indices)
        if self._graph is None:
            if self._warm < WARM_UP:
                return self._warm_up()
            self._record()
        if self._loss is None:
            return self._step(indices)
        self._graph.replay()
        return self._loss.clone()

    def _warm_up(self) -> Tensor:
        """An ordinary step on the stream that will record: what is made in it is then the recording's too."""
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        self._warm += 1
        noted = Operations(self._device) if self._warm > WARM_UP - 2 else None
        with torch.cuda.stream(self._stream), noted or nullcontext():
            loss = self._step(self._indices)
        usual.wait_stream(self._stream)
        if noted is not None:
            self._before.append(noted)
        return loss

    def _record(self) -> None:
        last, this = self._before
        self._before.clear()
        reason = this.elsewhere and f"{this.elsewhere} works on the host"
        if reason is None and last.noted != this.noted:
            reason = "its operations are not the same in each step"
        if reason is None:
            try:
                self._graph, self._loss = self._recorded()
            except Exception as error:  # nothing was computed: the eager step that follows raises what is not CUDA's
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            self._eager = True
            if reason not in _told:
                _told.add(reason)
                log.warning("training steps are not replayed as a CUDA graph, which takes longer: %s", reason)

    def _recorded(self) -> tuple[Any, Tensor]:
        """The graph of a step, and its loss.

        Other threads may be at work on the device: they may do what this one must not. So, unlike ``torch.cuda.graph``,
        it neither waits for the device nor gives memory back, which the others would have to take again.
        """
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        with _recording, torch.cuda.stream(self._stream):
            gc.disable()  # what it finds may give back memory, which no recording may
            self._capturable(True)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                loss = self._step(self._indices)
            except BaseException:
                with suppress(RuntimeError):  # says that the recording has failed
                    graph.capture_end()
                raise
            else:
                graph.capture_end()
            finally:
                self._capturable(False)
                if collects:
                    gc.enable()
        return graph, loss

    def _capturable(self, now: bool) -> None:
        """Fused optimizers keep all they count on the device, and still ask for this."""
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = now
