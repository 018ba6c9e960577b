"""A small cache of recent results: clients that share a backbone request the same tokens and prompts."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The `most` recently used values by key; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._turn = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under `key`, made if missing. Two threads may make it at the same time; one value is kept."""
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
    """A key that is equal for tensors of equal shape, dtype and bytes."""
    if tensor is None:
        return None
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(content).digest()
