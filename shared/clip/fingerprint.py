"""Identity of a frozen backbone: a digest of its weights and of everything else that determines its features."""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch


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
