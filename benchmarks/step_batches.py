"""Training splits of random images for `benchmarks.step`, with cached features and with pixels only."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property

import torch
from PIL import Image
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.clip.caches.features import PatchCache


class RandomImages:
    """A split of uint8 RGB images (count, side, side, 3), with the interface of a data source."""

    def __init__(self, count: int, side: int, draws: torch.Generator):
        self._pixels = torch.randint(256, (count, side, side, 3), dtype=torch.uint8, generator=draws).numpy()

    def __len__(self) -> int:
        return len(self._pixels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])

    def digest(self, index: int) -> str:
        return hashlib.sha256(self._pixels[index].tobytes()).hexdigest()


@dataclass
class KeptBatch:
    """A training split that repeats one batch ``steps`` times. Features are kept in memory, patch features on disk."""

    backbone: Backbone
    source: RandomImages
    cache: PatchCache
    pixels: Tensor  # (B, 3, H, W)
    classes: Tensor  # (B,)
    encoded: Tensor  # (B, d_e)
    steps: int = 1

    @property
    def labels(self) -> Tensor:
        return self.classes.repeat(self.steps)

    def __len__(self) -> int:
        return self.steps * len(self.classes)

    def features(self) -> Tensor:
        return self.encoded.repeat(self.steps, 1)

    def raw_features(self) -> Tensor:
        """The same as `features`: the time of a step does not depend on the length of the features."""
        return self.features()

    def images(self, indices: Tensor) -> Tensor:
        return self.pixels[indices % len(self.pixels)]

    def patches(self, indices: Tensor) -> Tensor:
        return self.cache.rows(self.backbone, self.source, (indices % len(self.classes)).tolist())

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        raise NotImplementedError("no method of this benchmark trains blocks of the image tower")


@dataclass
class PlainBatch(KeptBatch):
    """The same batch with only the pixels kept. ``tower_seconds``: CPU seconds of the image tower, which encodes it."""

    tower_seconds: float = 0.0

    @cached_property
    def _features(self) -> Tensor:
        began = time.process_time()
        features = self.backbone.encode_images(self.pixels)
        self.tower_seconds += time.process_time() - began
        return features

    @cached_property
    def _patches(self) -> Tensor:
        began = time.process_time()
        patches = self.backbone.encode_patches(self.pixels).half().float()
        self.tower_seconds += time.process_time() - began
        return patches

    def features(self) -> Tensor:
        return self._features

    def patches(self, indices: Tensor) -> Tensor:
        return self._patches[indices]
