"""Random crops and flips of training images: `training.augmentation: crop_flip`.

A crop has between 8 and 100 % of an image's area and an aspect ratio of 3:4 to 4:3, is resized to the backbone's size,
and is mirrored half of the time: what PromptFL, FedPGP and MaPLe train on (Szegedy et al., 2015; CoOp's transforms).
Where image features are kept, an image has a fixed number of such views, and each task sees one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Generator, Tensor

from promptfed.client_service.training.image_cache import ReadAhead
from promptfed.shared.clip import Backbone
from promptfed.shared.data import Split
from promptfed.shared.seeds import generator

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width over height
TRIES = 10
FLOAT_BYTES = 4


def kept_bytes(images: int, views: int, d_e: int) -> int:
    """What the feature cache may come to hold: a feature and its length for each view of each image."""
    return images * views * (d_e + 1) * FLOAT_BYTES


def crop_box(width: int, height: int, draws: Generator) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of a random crop; of the largest central one if ten tries do not fit."""
    for _ in range(TRIES):
        share, stretch, across, down = torch.rand(4, generator=draws).tolist()
        area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = math.exp(math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * stretch)
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, upper, left + wide, upper + high
    wide = min(width, round(height * ASPECT[1]))
    high = min(height, round(width / ASPECT[0]))
    left, upper = (width - wide) // 2, (height - high) // 2
    return left, upper, left + wide, upper + high


def crop_flip(image: Image.Image, size: tuple[int, int], draws: Generator) -> Image.Image:
    """A random crop of ``image`` at ``size`` (height, width), mirrored or not."""
    box = crop_box(image.width, image.height, draws)
    cut = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    mirrored = float(torch.rand((), generator=draws)) < 0.5
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut


class Views:
    """One view of each image of ``split``, drawn for ``purpose``: a split that the feature cache can read.

    View k of an image is the same in every task and process, since it is drawn for the image's digest and k alone.
    """

    def __init__(self, split: Split, backbone: Backbone, views: int, purpose: str):
        self._split = split
        self._backbone = backbone
        self._chosen = torch.randint(views, (len(split),), generator=generator(0, purpose, "views")).tolist()
        self._anew = generator(0, purpose, "crops")
        self.ahead = ReadAhead(split.image)

    def __len__(self) -> int:
        return len(self._split)

    def image(self, index: int) -> Image.Image:
        """The chosen view of an image."""
        draws = generator(0, self._split.digest(index), "view", self._chosen[index])
        return crop_flip(self._split.image(index), self._backbone.image_size, draws)

    def expect(self, indices: Sequence[int]) -> None:
        """As `Split.expect`."""
        self._split.expect(indices)

    def digest(self, index: int) -> str:
        """Of the image and the view."""
        return f"{self._split.digest(index)}-crop_flip-{self._chosen[index]}"

    def pixels(self, rows: Tensor) -> list[Tensor]:
        """The pixels of the images at ``rows (B,)``, cropped and flipped anew in every call."""
        images = self.ahead.take(rows.tolist())
        cut = [crop_flip(image, self._backbone.image_size, self._anew) for image in images]
        return [self._backbone.pixels(image) for image in cut]
