"""Steps of a task on a GPU, recorded once as a CUDA graph: each then takes one launch instead of some hundred.

A graph repeats what the device did, and nothing that Python would do otherwise in the next step. So a step is recorded
only if the two before it did the same operations, with the same numbers, on tensors of the device alone.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger("promptfed.training")

WARM_UP = 3  # steps before the recording: kernels are chosen in them, and memory is taken
LEAST_REPLAYS = 8  # with fewer left a recording does not pay

_recording = threading.Lock()  # CUDA records one graph at a time in a process
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
        if "attention" in func.__name__ and not _dropout(func, args, kwargs or {}):  # then nothing sets or reads a seed
            self._unset.extend(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.ndim == 0)
        self.noted.append((func, *(self._about(func, leaf) for leaf in tree_leaves((args, kwargs, made)))))
        return made

    def _about(self, func: Any, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf)
        if leaf.device.type != self._device.type:
            if any(leaf.data_ptr() == one.data_ptr() for one in self._unset):
                return leaf.dtype
            if leaf.ndim == 0 and leaf.device.type == "cpu":
                return repr(leaf.item())  # a number, which the recorded operation holds
            self.elsewhere = self.elsewhere or str(func)
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device


def _dropout(func: Any, args: Any, kwargs: Any) -> float:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return float(named.get("dropout_p", 0.0))


class Replayed:
    """``step(indices (B,))`` for each batch of a task, which returns the loss; batches of ``size`` are replayed.

    ``count``: how many batches of that size there are. It lives as long as the task, and with it the graph.
    """

    def __init__(
        self, step: Callable[[Tensor], Tensor], optimizer: Optimizer, device: torch.device, size: int, count: int
    ):
        self._step, self._optimizer, self._size = step, optimizer, size
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._indices = torch.zeros(size, dtype=torch.int64, device=device)
        self._before: list[Operations] = []
        self._graph: Any = None
        self._loss: Tensor | None = None
        self._eager = count < WARM_UP + LEAST_REPLAYS

    def __call__(self, indices: Tensor) -> Tensor:
        if self._eager or len(indices) != self._size:
            return self._step(indices)
        self._indices.copy_(indices)
        if self._graph is None:
            if len(self._before) < WARM_UP:
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
        noted = Operations(self._device)
        with torch.cuda.stream(self._stream), noted:
            loss = self._step(self._indices)
        usual.wait_stream(self._stream)
        self._before.append(noted)
        return loss

    def _record(self) -> None:
        *_, last, this = self._before
        self._before.clear()
        reason = this.elsewhere and f"{this.elsewhere} works on the host"
        if reason is None and last.noted != this.noted:
            reason = "its operations are not the same in each step"
        if reason is None:
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may be at work on the device: they may do what this one must not.
                with _recording, torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._capturable(True)
                    loss = self._step(self._indices)
                self._graph, self._loss = graph, loss
            except Exception as error:  # nothing was computed: the eager step that follows raises what is not CUDA's
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            finally:
                self._capturable(False)
        if reason is not None:
            self._eager = True
            if reason not in _told:
                _told.add(reason)
                log.warning("training steps are not replayed as a CUDA graph, which takes longer: %s", reason)

    def _capturable(self, now: bool) -> None:
        """Fused optimizers keep all they count on the device, and still ask for this."""
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = now
