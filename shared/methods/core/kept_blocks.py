"""Images that go through the frozen lower blocks of the tower once: what they are to the methods above these."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from promptfed.shared.methods.core import toolkit as pf

CacheBlocks = Annotated[
    bool,
    Field(
        description="keep on the client's disk, in 16 bits, what each image is before the first block that changes "
        "(ViT-B/16: 303 kB an image): the frozen blocks below run once an image instead of once a step"
    ),
]


class KeptRows:
    """A split whose ``images`` are rows ``(B, S, d_v)`` before block ``start``, read from the disk."""

    def __init__(self, split: pf.Split, start: int):
        self._split, self._start = split, start

    @property
    def labels(self) -> Tensor:
        """As of the split."""
        return self._split.labels

    def __len__(self) -> int:
        return len(self._split)

    def features(self) -> Tensor:
        """As of the split."""
        return self._split.features()

    def raw_features(self) -> Tensor:
        """As of the split."""
        return self._split.raw_features()

    def patches(self, indices: Tensor) -> Tensor:
        """As of the split."""
        return self._split.patches(indices)

    def images(self, indices: Tensor) -> Tensor:
        """``(B, S, d_v)`` in the place of images."""
        return self.block_rows(indices, self._start)

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        """As of the split."""
        return self._split.block_rows(indices, start)


def are_rows(images: Tensor) -> bool:
    """Whether a split has given rows ``(B, S, d_v)`` and not images ``(B, 3, H, W)``."""
    return images.ndim == 3


def check_kept_blocks(method: str, spec: pf.FederationSpec, *, frozen_below: bool, how: str) -> None:
    """Raise MethodError where no block below the changed ones is left, or images change from step to step."""
    if not frozen_below:
        raise pf.MethodError(f"{method} changes the first block too, so that no rows can be kept: {how}")
    if spec.training.augmentation != "none":
        raise pf.MethodError(
            "cache_blocks keeps what an image is, and with training.augmentation it is another one in every step: "
            "leave one of them out"
        )
