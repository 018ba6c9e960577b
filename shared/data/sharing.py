"""Sources of many clients from few data sets: each data set is opened once, and its images are hashed once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from promptfed.shared.data.options import CUTTING_OPTIONS, Options, Parts, Role
from promptfed.shared.data.registry import (
    AT_OPENING,
    BY_ROLE,
    check_filled,
    cut,
    open_whole,
    parse_uri,
    tell_look_alikes,
)
from promptfed.shared.data.source import Source


@dataclass
class _Whole:
    """A whole data set and its partitions so far."""

    source: Source
    parts: Parts = field(default_factory=dict)


class SharedSources:
    """Opens URIs like `open_source`, with equal labels, images and digests; for clients in one process."""

    def __init__(self) -> None:
        self._given: dict[str, Source] = {}
        self._wholes: dict[tuple[Any, ...], _Whole] = {}
        self._turn = threading.Lock()

    def add(self, uri: str, source: Source) -> None:
        """Register ``source`` under ``uri``, which may be any text."""
        with self._turn:
            self._given[uri] = source

    def open(self, uri: str, role: Role = "trainer") -> Source:
        """The source of ``uri`` for a client with ``role``. Raises DataError as `open_source`."""
        with self._turn:
            if uri in self._given:
                return self._given[uri]
            scheme, body, options = parse_uri(uri, role)
            whole = self._whole(scheme, body, options)
            source = cut(scheme, replace(whole.source, uri=uri), options, whole.parts)
        check_filled(source, role)
        tell_look_alikes(uri, source.class_names)
        return source

    def _whole(self, scheme: str, body: str, options: Options) -> _Whole:
        cutting = CUTTING_OPTIONS - AT_OPENING.get(scheme, frozenset())
        own = {name: value for name, value in options.values.items() if name not in cutting}
        whole_test = scheme in BY_ROLE and options.is_whole_test
        key = scheme, body, tuple(sorted(own.items())), options.role if scheme in BY_ROLE else "", whole_test
        if key not in self._wholes:
            self._wholes[key] = _Whole(open_whole(scheme, body, options))
        return self._wholes[key]
