"""Places of a batch at which a tower gives an image the same feature."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.files import write_whole

BATCH = 32  # images of a batch on a CPU
DEVICE_BATCH = 256  # and elsewhere
SLOTS_FILE = "slots.json"
PROBE_SEED = 20_240_301
Encode = Callable[[Tensor], Tensor]
"""What a cache keeps of a batch of images `(batch_size, 3, H, W)` or their pixels: a tensor with a row for each."""


def batch_size(device: torch.device) -> int:
    """How many images go through a tower together. Bits depend on it, so that it is the same for every batch."""
    return BATCH if device.type == "cpu" else DEVICE_BATCH


def kept_slots(folder: Path, backbone: Backbone, encode: Encode) -> list[int]:
    """The largest set of places in a batch that agree bit for bit, measured once and stored in ``folder``."""
    file = folder / SLOTS_FILE
    try:
        return [int(slot) for slot in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, RecursionError):
        slots = agreeing_slots(backbone, encode)
        write_whole(file, json.dumps(slots).encode(), mode=0o600)
        return slots


def agreeing_slots(backbone: Backbone, encode: Encode | None = None) -> list[int]:
    """The largest set of places in a batch at which the same image gives the same bits.

    encode: by default the image tower.
    """
    encode = encode or backbone.encode_images
    generator = torch.Generator().manual_seed(PROBE_SEED)
    image = torch.randn(1, 3, *backbone.image_size, generator=generator)
    rows = encode(image.expand(batch_size(backbone.device), -1, -1, -1)).cpu()
    kinds = [hashlib.sha256(row.numpy().tobytes()).digest() for row in rows]
    most_common = Counter(kinds).most_common(1)[0][0]
    return [slot for slot, kind in enumerate(kinds) if kind == most_common]


def compute_identity(device: torch.device) -> dict[str, Any]:
    """Everything besides weights and image that may change the bits of a feature."""
    identity: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "matmul": torch.get_float32_matmul_precision(),
        "batch": batch_size(device),
    }
    if device.type == "cpu":
        return identity | {"threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    if device.type != "cuda":
        return identity
    return identity | {"name": torch.cuda.get_device_name(device), "tf32": torch.backends.cudnn.allow_tf32}
