"""What a backbone computed last: clients that share one in a process ask for the same tokens and the same prompts."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The `most` values that were asked for last, by key; from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._turn = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under `key`; made where it is not there. Two threads may make it at once, and one is kept."""
        with self._turn:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._turn:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


def content_key(tensor: Tensor | None) -> Hashable:
    """Equal for tensors of equal shape, dtype and bytes."""
    if tensor is None:
        return None
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(content).digest()
