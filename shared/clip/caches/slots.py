"""Bit-reproducible batches for the image caches: batches of one size, of which only agreeing places are used.

Promise 4 of the protocol requires the same bits regardless of which images are already cached. For this, every batch
has the same size (missing rows are zero), since the kernels of a matrix product depend on its shape. A row's bits may
also depend on its place in the batch, so only those places are used at which the same image gives the same feature bit
for bit (measured once per backbone). Other influences on the bits (device, torch version, threads) are part of the
folder's name.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.fingerprint import config_digest
from promptfed.shared.files import write_whole

BATCH = 32  # images of a batch on a CPU
DEVICE_BATCH = 256  # and elsewhere
SLOTS_FILE = "slots.json"
PROBE_SEED = 20_240_301

Encode = Callable[[Tensor], Tensor]
"""What a cache keeps of a batch of images `(batch_size, 3, H, W)` or their pixels: a tensor with a row for each."""


class ImageSplit(Protocol):
    """The interface of a data split for the cache."""

    def __len__(self) -> int: ...

    def image(self, index: int, /) -> Any:
        """The PIL image."""

    def digest(self, index: int, /) -> str:
        """A digest of the image's content, as text."""


def batch_size(device: torch.device) -> int:
    """How many images go through a tower together. Bits depend on it, so that it is the same for every batch."""
    return BATCH if device.type == "cpu" else DEVICE_BATCH


def folder_name(backbone: Backbone, **more: str) -> str:
    """The folder for the rows of one backbone on one kind of machine; ``more`` names the kind of row."""
    identity = more | {
        "fingerprint": backbone.fingerprint,
        "transform": backbone.transform_id,
        "compute": _compute_identity(backbone.device),
    }
    return config_digest(identity).removeprefix("sha256:")


def kept_slots(folder: Path, backbone: Backbone, encode: Encode) -> list[int]:
    """The largest set of places in a batch that agree bit for bit, measured once and stored in ``folder``."""
    file = folder / SLOTS_FILE
    try:
        return [int(slot) for slot in json.loads(file.read_text())]
    except (OSError, ValueError):
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


def _compute_identity(device: torch.device) -> dict[str, Any]:
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
