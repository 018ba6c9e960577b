"""Identity of a frozen backbone (a digest of what determines its features), and a cache of recent values."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor


def config_digest(config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a JSON-like mapping in canonical form (sorted keys, no spaces; tuples count as lists)."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def weights_fingerprint(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` over name, dtype, shape and little-endian bytes of every tensor in name order, then `config`.

    The config is included because equal weights with another activation, preprocessing or tokenizer give other
    features.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode())
        digest.update(_little_endian_bytes(tensor))
    digest.update(config_digest(config).encode())
    return "sha256:" + digest.hexdigest()


def _little_endian_bytes(tensor: torch.Tensor) -> memoryview:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        raw = raw.reshape(-1, tensor.element_size()).flip(1).contiguous().reshape(-1)
    array: Any = raw.numpy()
    return memoryview(array)


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
