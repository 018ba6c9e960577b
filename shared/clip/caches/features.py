"""The kinds of rows that clients cache of their images: pooled features, patch features, rows before a block."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.caches.rows import Done, RowCache, nothing
from promptfed.shared.clip.caches.slots import ImageSplit

PATCHES, BLOCKS = "patches", "blocks"  # folders beside that of the pooled features


class PatchCache(RowCache):
    """Normalised patch features `(M, d_e)` in float16: 200 kB per image with ViT-B/16 (196 × 512 numbers)."""

    def about(self) -> dict[str, str]:
        return {}

    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        return backbone.patch_tokens or 0, backbone.d_e

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        return backbone.encode_patches(images)


class BlockCache(RowCache):
    """Rows `(S, d_v)` of each image before block ``start`` in float16, for methods that change only later blocks.

    An image takes 2·S·d_v bytes: 303 kB with ViT-B/16, 77 kB with ViT-B/32.
    """

    def __init__(self, root: Path, start: int, *, keep: bool = True, max_bytes: int | None = None) -> None:
        super().__init__(root, keep=keep, max_bytes=max_bytes)
        self._start = start

    def about(self) -> dict[str, str]:
        return {"row": f"before block {self._start}"}

    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        tower = backbone.vision_tower()
        return tower.positions, tower.width

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        return rows_before(backbone, images, self._start)


@torch.no_grad()
def rows_before(backbone: Backbone, images: Tensor, start: int) -> Tensor:
    """Rows `(B, S, d_v)` of images `(B, 3, H, W)` before block ``start`` of the frozen tower, not rounded."""
    tower = backbone.vision_tower()
    return tower.run(tower.rows(backbone.image_input(images)), 0, start)


class FeatureCache(RowCache):
    """Pooled features in float32, normalised and followed by their length `(d_e + 1,)`, and caches of the other kinds.

    ``max_bytes`` bounds the pooled features and, separately, the blocks' rows; ``patches`` have no bound.
    """

    dtype = torch.float32
    in_memory = True

    def __init__(self, root: Path, *, max_bytes: int | None = None) -> None:
        super().__init__(root, max_bytes=max_bytes)
        self.patches = PatchCache(self._root / PATCHES)
        self._blocks = dict[int, BlockCache]()

    def blocks(self, start: int) -> BlockCache:
        """The cache of the rows before block ``start``, with the same bound."""
        if start not in self._blocks:
            root = self._root / BLOCKS
            self._blocks[start] = BlockCache(root, start, max_bytes=self._max_bytes)
        return self._blocks[start]

    def about(self) -> dict[str, str]:
        return {"row": "normalised, length"}

    def shape(self, backbone: Backbone) -> tuple[int, ...]:
        return (backbone.d_e + 1,)

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        raw = backbone.encode_images(images, normalize=False)
        lengths = torch.linalg.vector_norm(raw, dim=-1, keepdim=True)
        return torch.cat([F.normalize(raw, dim=-1), lengths], dim=1)

    def features(
        self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None, done: Done = nothing
    ) -> Tensor:
        """Normalised features `(N, d_e)` on the CPU of all images, or of those at ``indices`` in that order.

        ``done``: see `rows`.
        """
        rows = self.rows(backbone, split, range(len(split)) if indices is None else indices, done)
        return rows[:, :-1].contiguous()

    def raw_features(
        self, backbone: Backbone, split: ImageSplit, *, indices: Sequence[int] | None = None, done: Done = nothing
    ) -> Tensor:
        """The same features without normalisation."""
        rows = self.rows(backbone, split, range(len(split)) if indices is None else indices, done)
        return rows[:, :-1] * rows[:, -1:]
