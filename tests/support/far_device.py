"""A device far away that behaves like a GPU, on a CPU: torch's ``meta``, of which Python says ``cuda:0``.

Its tensors wrap CPU tensors. As with CUDA, tensors of two places that meet raise, unless the CPU's is a number; memory
is pinned by copying into memory of the same strides, which an expanded tensor has not; and NumPy sees nothing of it.
Whatever the CPU waits for (values, sizes that depend on values, copies from or to memory that may move) is counted by
the line of this project that asks. Numbers drawn on the device are refused: a GPU draws others than the CPU.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests import ROOT
from tests.support.recording_device import Graph

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
INSIDE = torch.device("meta")  # what torch's C++ is told: a device for which autograd has no threads of its own

WAITING = {  # sizes or checks of the result are read by the CPU
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount",
    "_linalg_check_errors", "_linalg_svd", "_linalg_eigh", "linalg_eig", "_local_scalar_dense", "is_nonzero",
}  # fmt: skip
NUMBERS = {"masked_fill", "fill", "index_put", "where", "index_fill", "scatter"}  # take the CPU's numbers as well
INDEXING = {"index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"}


class FarTensor(Tensor):
    """``near`` on the device."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor, requires_grad: bool = False) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=INSIDE, requires_grad=requires_grad,
        )  # fmt: skip
        made.near = near
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"far {self.near!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on what the tensors wrap. Raises as CUDA does where tensors of two places meet."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    far = {id(leaf.near): leaf for leaf in leaves if isinstance(leaf, FarTensor)}
    here = [leaf for leaf in leaves if not isinstance(leaf, FarTensor)]
    target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    assert not any(leaf.is_meta for leaf in here), "C++ has made a tensor there unseen"
    if not far and target != INSIDE.type:
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    _expect(func, name, args, kwargs, here)
    late = name == "_to_copy" and target == "cpu" and kwargs.get("non_blocking")
    if target is not None:
        kwargs = {**kwargs, "device": CPU}

    def near(leaf: Any) -> Any:
        return leaf.near if isinstance(leaf, FarTensor) else leaf

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return far[id(leaf)] if id(leaf) in far else FarTensor(leaf)

    with torch._C.DisableTorchFunction():
        given, options = tree_map(near, (args, kwargs))
        result = func(*given, **options)
        if late:
            return _on_its_way(result)
        if target == "cpu" or (name == "copy" and not isinstance(args[0], FarTensor)):
            return result
        return tree_map(back, result)


def _expect(func: Any, name: str, args: Any, kwargs: dict[str, Any], here: list[Tensor]) -> None:
    """Count what the CPU waits for. Raises where CUDA does, or draws."""
    if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
        raise AssertionError(f"{name} draws on the device, where other numbers are drawn than on the CPU")
    if name in ("copy", "_to_copy"):
        late = kwargs.get("non_blocking", len(args) > 2 and bool(args[2]))
        leaves = name == "_to_copy" and isinstance(args[0], FarTensor)  # into memory that torch pins
        stays = leaves and (kwargs.get("device") is None or torch.device(kwargs["device"]) == INSIDE)
        if (here or leaves) and not stays and not (late and (leaves or is_pinned(here[0]))):
            note("copied to or from the CPU")
    elif name in INDEXING:
        _indexed(args)
    elif any(_meets(func, name, args, leaf) for leaf in here):
        found = f"found at least two devices, {CUDA} and {CPU}! (in {name})"
        raise RuntimeError(f"Expected all tensors to be on the same device, but {found}")
    elif name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note(name)


def _meets(func: Any, name: str, args: Any, here: Tensor) -> bool:
    """Whether a tensor of the CPU may not be there: numbers may, except as what is written to."""
    number = here.ndim == 0 and (torch.Tag.pointwise in func.tags or name in NUMBERS or name.startswith("_foreach"))
    return not number or (bool(args) and args[0] is here and func._schema.is_mutable)


def _indexed(args: Any) -> None:
    """Indices on the CPU are copied, and those of ``bool`` counted, while the CPU waits."""
    values = args[2] if len(args) > 2 else None
    if not isinstance(args[0], FarTensor):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if values is not None and not isinstance(values, FarTensor) and values.ndim:
        raise RuntimeError(f"expected self and value to be on the same device, but they are on {CUDA} and {CPU}")
    for index in args[1]:
        if index is not None and not isinstance(index, FarTensor):
            note("indices of the CPU")
        if index is not None and index.dtype in (torch.bool, torch.uint8) and (values is None or values.ndim):
            note("indexed by bool")


ON_THEIR_WAY: list[tuple[Tensor, Tensor]] = []  # copies to the CPU that nobody has waited for, and their values


def _on_its_way(values: Tensor) -> Tensor:
    """A pinned copy without its values: they arrive when something that was recorded later is waited for."""
    there = pinned(torch.full_like(values, float("nan")) if values.is_floating_point() else torch.zeros_like(values))
    ON_THEIR_WAY.append((there, values))
    return there


def arrived(count: int | None = None) -> None:
    """The first ``count`` copies are made, or all."""
    for there, values in ON_THEIR_WAY[:count]:
        there.copy_(values)
    del ON_THEIR_WAY[:count]


def is_pinned(tensor: Tensor) -> bool:
    """Whether the tensor's memory cannot move."""
    return not isinstance(tensor, FarTensor) and getattr(tensor.untyped_storage(), "pinned", False)


def pinned(tensor: Tensor) -> Tensor:
    """A copy in memory that cannot move. Raises for what shares memory with itself, as torch does."""
    if isinstance(tensor, FarTensor):
        raise RuntimeError(f"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned ({tensor.shape})")
    if is_pinned(tensor):
        return tensor
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())
    storage.pinned = True
    made = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return made.copy_(tensor)  # refuses, as torch's does


WATCHES: list[Counter[str]] = []


def note(what: str) -> None:
    """Count a wait, by the last two lines of this project that led to it."""
    if not WATCHES:
        return
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and ".venv" not in path and f"{ROOT}/tests" not in path:
            lines.append(f"{Path(path).name}:{frame.f_lineno}")
        frame = frame.f_back
    for watch in WATCHES:
        watch[f"{what}: {'; '.join(reversed(lines))}"] += 1


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts what the CPU waits for, by kind and line."""
    counted: Counter[str] = Counter()
    WATCHES.append(counted)
    try:
        yield counted
    finally:
        WATCHES.remove(counted)


def inside(given: Any) -> Any:
    """A device as torch's C++ is told it."""
    if isinstance(given, torch.device | str) and str(given).partition(":")[0] == "cuda":
        if torch.device(given).index:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return INSIDE
    return given


def _device(func: Any, args: Any, kwargs: Any) -> Any:
    found = func(*args, **kwargs)
    return CUDA if found == INSIDE else found


def _numpy(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], FarTensor):
        text = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise TypeError(f"can't convert {CUDA} device type tensor to numpy. {text}")
    return func(*args, **kwargs)


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], FarTensor):
        note("tolist")
    return _memory(func, args, kwargs)


def _get_data(func: Any, args: Any, kwargs: Any) -> Any:
    return FarTensor(args[0].near) if isinstance(args[0], FarTensor) else func(*args, **kwargs)


def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if isinstance(args[0], FarTensor):
        args[0].near = args[1].near
    return result


def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].near if isinstance(args[0], FarTensor) else args[0], *args[1:], **kwargs)


def _copy_of(func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], FarTensor):
        return func(*args, **kwargs)
    own = args[0]
    made = FarTensor(own.near.clone(), own.requires_grad)
    made.__dict__ |= {name: value for name, value in own.__dict__.items() if name != "near"}
    args[1][id(own)] = made
    return made


SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    Tensor.device.__get__: _device, Tensor.data.__get__: _get_data, Tensor.data.__set__: _set_data,
    Tensor.cuda: lambda func, args, kwargs: args[0].to(INSIDE, **kwargs),
    Tensor.pin_memory: lambda func, args, kwargs: pinned(args[0]),
    Tensor.is_pinned: lambda func, args, kwargs: is_pinned(args[0]), Tensor.numpy: _numpy, Tensor.__array__: _numpy,
    Tensor.__deepcopy__: _copy_of, Tensor.data_ptr: _memory, Tensor.tolist: _tolist, Tensor.untyped_storage: _memory,
}  # fmt: skip


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    """Lists as indices become tensors on the CPU, which C++ would not show."""
    where = args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(args[0], FarTensor):
        where = tuple(torch.tensor(one) if isinstance(one, list) else one for one in where)
    return func(args[0], where, *args[2:])


SPECIAL |= {Tensor.__getitem__: _item, Tensor.__setitem__: _item}


class Place(TorchFunctionMode):
    """Puts the device in the place of ``cuda`` in calls of one thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SPECIAL:
            return SPECIAL[func](func, args, kwargs)
        if func is Tensor.to or func is Tensor.type:
            args = (args[0], *map(inside, args[1:]))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": inside(kwargs["device"])}
            if func in (torch.tensor, torch.as_tensor) and kwargs["device"] == INSIDE:  # unseen by `Inside`
                return func(*args, **{**kwargs, "device": None}).to(INSIDE)
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


class Inside(TorchDispatchMode):
    """What C++ makes on the device, in one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class Event:
    """What `torch.cuda.Event` is where kernels are done at once, and copies to the CPU when they are waited for."""

    def __init__(self, *given: Any, **options: Any):
        self._before: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: Any = None) -> None:
        self._before = list(ON_THEIR_WAY)

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        last = [at for at, (there, _) in enumerate(ON_THEIR_WAY) if any(there is one for one, _ in self._before)]
        arrived(last[-1] + 1 if last else 0)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    """What `torch.cuda.Stream` is where everything is done in order."""

    def __init__(self, *given: Any, **options: Any):
        pass

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        note("a stream")
        arrived()


def _synchronize(*given: Any) -> None:
    note("the device")
    arrived()


@contextmanager
def far_device() -> Iterator[torch.device]:
    """``cuda`` is a device, in this thread and in those that start inside."""
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with Place(), Inside():
            run(thread)

    about = SimpleNamespace(
        name="stand-in", total_memory=1 << 36, major=9, minor=0, multi_processor_count=1, is_integrated=0
    )
    with pytest.MonkeyPatch.context() as patch, Place(), Inside():
        patch.setattr(threading.Thread, "run", run_there)
        for name, found in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda *given: about.name,
            "get_device_capability": lambda *given: (9, 0),
            "get_device_properties": lambda *given: about,
            "is_bf16_supported": lambda *given: True,
            "synchronize": _synchronize,
            "set_device": lambda *given: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda *given: 0,
            "max_memory_allocated": lambda *given: 0,
            "memory_reserved": lambda *given: 0,
            "reset_peak_memory_stats": lambda *given: None,
            "mem_get_info": lambda *given: (about.total_memory, about.total_memory),
            "is_current_stream_capturing": lambda: False,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda *given: Stream(),
            "default_stream": lambda *given: Stream(),
            "stream": lambda *given: nullcontext(),
            "CUDAGraph": Graph,
            "device": lambda *given: nullcontext(),
        }.items():
            patch.setattr(torch.cuda, name, found)
        patch.setattr(torch.accelerator, "current_stream", lambda *given: Stream())
        patch.setattr(Tensor, "record_stream", lambda *given: None)
        yield CUDA
    Graph.made.clear()
