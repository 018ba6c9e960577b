"""Image features of all clients at once: in whole batches, where each client by itself would leave most half empty."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from promptfed.experiments.simulation.preparation import SimulationSetup
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.clip.caches.rows import CacheCost
from promptfed.shared.data import DataError, Split
from promptfed.shared.methods import method_for

log = logging.getLogger("promptfed.simulation")

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
    cache: FeatureCache,
    backbone: Backbone,
    splits: Iterable[Split],
    threads: int,
    stopped: Callable[[], bool],
    patches: bool = False,
) -> None:
    """Put the features of all images into ``cache``, whose bits depend on the number of ``threads``.

    With ``patches`` those of their patches too; what they take on disk is told first.

    Raises:
        DataError: an image cannot be read.
        OSError: there is no room for the patches' features.
    """
    torch.set_num_threads(threads)
    images = _Images(splits)
    if patches:
        _tell_cost(cache.patches.cost(backbone, [images]))
    for start in range(0, len(images), STEP):
        if stopped():
            return
        rows = range(start, min(start + STEP, len(images)))
        cache.features(backbone, images, indices=rows)
        if patches:
            cache.patches.fill(backbone, images, rows)


def _tell_cost(cost: CacheCost) -> None:
    if not cost.images:
        return
    text = f"the patch features of {cost.images:,} images take {cost.bytes / 1e6:,.1f} MB in {cost.folder}"
    if not cost.fits:
        raise OSError(errno.ENOSPC, f"{text}; {cost.free / 1e6:,.1f} MB are free there: give a folder with room")
    log.info("%s", text)


async def warm_all(setup: SimulationSetup) -> None:
    """Compute the features of all images that clients will ask for, where the method lets them be kept.

    Raises:
        CommandError: an image cannot be read.
    """
    needs = method_for(setup.spec).needs
    if not needs.cached_features:
        return
    splits = [split for client in setup.clients for split in client.splits()]
    stop = threading.Event()
    job = asyncio.create_task(
        asyncio.to_thread(warm, setup.features, setup.backbone, splits, setup.threads, stop.is_set, needs.patch_tokens)
    )
    try:
        await asyncio.shield(job)
    except DataError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    finally:
        stop.set()
        await asyncio.wait({job})
