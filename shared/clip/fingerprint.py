"""Digests of a frozen backbone's weights and configuration, and of tensors."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Hashable, Mapping
from typing import Any

from promptfed.shared.canonical import canonical_json
from promptfed.shared.tensors.lazy import Tensor, torch


def config_digest(config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a JSON-like mapping in canonical form (sorted keys, no spaces; tuples count as lists)."""
    return "sha256:" + hashlib.sha256(canonical_json(config).encode()).hexdigest()


def weights_fingerprint(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
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


def _little_endian_bytes(tensor: Tensor) -> memoryview:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        raw = raw.reshape(-1, tensor.element_size()).flip(1).contiguous().reshape(-1)
    array: Any = raw.numpy()
    return memoryview(array)


def content_key(tensor: Tensor | None) -> Hashable:
    """A key that is equal for tensors of equal shape, dtype and bytes."""
    if tensor is None:
        return None
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(content).digest()
