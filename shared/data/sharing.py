"""Many clients' sources from few data sets: each is opened once, its images drawn, decoded and hashed at most once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from promptfed.shared.data.options import CUTTING_OPTIONS, Options, Parts, Role
from promptfed.shared.data.registry import AT_OPENING, BY_ROLE, OF_FILES, check_filled, cut, open_whole, parse_uri
from promptfed.shared.data.source import Source, Split, groups_at


class SharedSplit(Split):
    """Some rows of a split that others look at too: images, what is drawn or decoded of them, and digests are its."""

    def __init__(self, whole: Split, rows: torch.Tensor, labels: torch.Tensor) -> None:
        self.labels = labels
        self._whole = whole
        self._rows = rows
        self.groups = groups_at(whole.groups, rows)

    def image(self, index: int) -> Image.Image:
        """One image, RGB."""
        return self._whole.image(int(self._rows[index]))

    def digest(self, index: int) -> str:
        """As `Split.digest`; computed once for all who look at the image."""
        return self._whole.digest(int(self._rows[index]))

    def select(self, rows: torch.Tensor) -> SharedSplit:
        """The images at ``rows`` (M,), in that order."""
        return SharedSplit(self._whole, self._rows[rows], self.labels[rows])


@dataclass
class _Whole:
    """A data set as its opener gives it, and how it has been divided so far."""

    source: Source
    parts: Parts = field(default_factory=dict)


class SharedSources:
    """Opens URIs as `open_source` does, with the same labels, images and digests; for clients in one process."""

    def __init__(self) -> None:
        self._given: dict[str, Source] = {}
        self._wholes: dict[tuple[Any, ...], _Whole] = {}
        self._turn = threading.Lock()

    def add(self, uri: str, source: Source) -> None:
        """Answer ``uri``, which may be any text, with ``source``."""
        with self._turn:
            self._given[uri] = source

    def open(self, uri: str, role: Role = "trainer") -> Source:
        """The source that ``uri`` names, for one who has ``role``. Raises DataError as `open_source` does."""
        with self._turn:
            if uri in self._given:
                return self._given[uri]
            scheme, body, options = parse_uri(uri, role)
            whole = self._whole(scheme, body, options)
            source = cut(scheme, replace(whole.source, uri=uri), options, whole.parts)
        check_filled(source, role)
        return source

    def _whole(self, scheme: str, body: str, options: Options) -> _Whole:
        cutting = CUTTING_OPTIONS - AT_OPENING if scheme in OF_FILES else CUTTING_OPTIONS
        own = {name: value for name, value in options.values.items() if name not in cutting}
        whole_test = scheme in BY_ROLE and options.is_whole_test
        key = scheme, body, tuple(sorted(own.items())), options.role if scheme in BY_ROLE else "", whole_test
        if key not in self._wholes:
            source = open_whole(scheme, body, options)
            self._wholes[key] = _Whole(replace(source, train=_shared(source.train), test=_shared(source.test)))
        return self._wholes[key]


def _shared(split: Split) -> SharedSplit:
    return SharedSplit(split, torch.arange(len(split)), split.labels)
