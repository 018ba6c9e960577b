"""Image features of all clients at once: in whole batches, where each client by itself would leave most half empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Split

STEP = 2 * 32  # images between two looks at whether to stop: whole batches of the cache


class _Images:
    """Distinct images of many splits, as the feature cache sees a split."""

    def __init__(self, splits: Iterable[Split]):
        places: dict[str, tuple[Split, int]] = {}
        for split in splits:
            for index in range(len(split)):
                places.setdefault(split.digest(index), (split, index))
        self._digests = list(places)
        self._places = list(places.values())

    def __len__(self) -> int:
        return len(self._places)

    def image(self, index: int) -> Any:
        split, row = self._places[index]
        return split.image(row)

    def digest(self, index: int) -> str:
        return self._digests[index]


def warm(
    cache: FeatureCache, backbone: Backbone, splits: Iterable[Split], threads: int, stopped: Callable[[], bool]
) -> None:
    """Put the features of all images into ``cache``, whose bits depend on the number of ``threads``.

    Raises:
        DataError: an image cannot be read.
    """
    torch.set_num_threads(threads)
    images = _Images(splits)
    for start in range(0, len(images), STEP):
        if stopped():
            return
        cache.features(backbone, images, indices=range(start, min(start + STEP, len(images))))
