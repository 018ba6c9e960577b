"""The images of simulated clients, and their features, computed for all clients together in whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError, Source, Split

STEP = 8 * 32  # images that a process takes at a time: whole batches of the cache


class _Stopped(Exception):
    pass


@dataclass(frozen=True)
class SimulatedClient:
    """A site with its opened data."""

    site: Site
    source: Source
    tests: dict[str, Source]

    def splits(self) -> list[Split]:
        """The splits whose features the client computes."""
        trained = [self.source.train] if self.site.role == "trainer" else []
        return [*trained, self.source.test, *(other.test for other in self.tests.values())]


class Images:
    """The distinct images of many splits, with the interface that the feature cache expects of a split."""

    def __init__(self, splits: Iterable[Split]):
        places: dict[str, tuple[Split, int]] = {}
        for split in splits:
            for row in range(len(split)):
                places.setdefault(split.digest(row), (split, row))
        self._places = list(places.items())

    def __len__(self) -> int:
        return len(self._places)

    def image(self, index: int) -> Any:
        split, row = self._places[index][1]
        return split.image(row)

    def digest(self, index: int) -> str:
        return self._places[index][0]

    def path(self, index: int) -> Path | None:
        split, row = self._places[index][1]
        return split.path(row)


def images_of(clients: Iterable[SimulatedClient]) -> Images:
    """All images whose features the clients compute.

    Raises:
        CommandError: an image cannot be read.
    """
    try:
        return Images(split for client in clients for split in client.splits())
    except DataError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def fill(
    cache: FeatureCache,
    backbone: Backbone,
    images: Images,
    rows: range,
    stopped: Callable[[], bool],
    patches: bool = False,
) -> None:
    """Put the features of the images at ``rows`` into ``cache``; with ``patches``, those of their patches too.

    Raises:
        DataError: an image cannot be read.
        OSError: the disk has no room for the patches' features.
    """

    def done(count: int) -> None:
        if stopped():
            raise _Stopped

    with suppress(_Stopped):
        done(0)
        cache.features(backbone, images, indices=rows, done=done)
        if patches:
            cache.patches.fill(backbone, images, rows, done)
