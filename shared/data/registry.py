"""Opens the source of a data URI. A new kind of source is a row of `schemes.SCHEMES`."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from promptfed.shared.data.cutting import Parts, apply_common
from promptfed.shared.data.options import Options, Role, Use
from promptfed.shared.data.pixels import Scale
from promptfed.shared.data.schemes import SCHEMES
from promptfed.shared.data.source import DataError, Source
from promptfed.shared.plain_text import alike_text, expect_visible, scale_text

log = logging.getLogger("promptfed.data")


def open_source(uri: str, role: Role = "trainer", greys: Sequence[Scale] = ()) -> Source:
    """Open the source ``scheme:body?option=value`` for a trainer or an evaluator, with its options applied.

    ``greys``: the scales of the data that a result was trained on, which ``grey=`` of the URI replaces.

    Raises:
        DataError: the scheme or an option is unknown, a value is invalid, or the data cannot be used.
    """
    scheme, body, options = parse_uri(uri, role)
    options = options.model_copy(update={"known_grey": greys[0] if len(greys) == 1 else None})
    source = cut(scheme, open_whole(scheme, body, options), options)
    if len(greys) > 1 and source.grey is not None and not options.given(["grey"]):
        scales = " or as ".join(map(scale_text, greys))
        raise DataError(f"{uri}: the training data read grey pictures as {scales}; say which with grey=.")
    check_filled(source, role)
    tell_look_alikes(uri, source.class_names)
    return source


def class_names_of(uri: str, role: Role = "trainer") -> tuple[str, ...]:
    """The class names of the source ``uri``, without reading its images. Raises DataError as `open_source`."""
    scheme, body, options = parse_uri(uri, role)
    options = options.model_copy(update={"names_only": True})
    names = cut(scheme, open_whole(scheme, body, options), options).class_names
    tell_look_alikes(uri, names)
    return names


@lru_cache(64)
def tell_look_alikes(uri: str, names: tuple[str, ...]) -> None:
    """Log, once for each source, the class names that people or text towers take for one, or that end in a space."""
    if text := alike_text(names):
        log.warning("%s: these class names look alike: %s; rename them, or merge classes that are one", uri, text)
    elif spaced := [name for name in names if name != name.strip()]:
        shown = ", ".join(map(repr, spaced[:5]))
        log.warning("%s: these class names begin or end with a space: %s; remove it", uri, shown)


def parse_uri(uri: str, role: Role = "trainer") -> tuple[str, str, Options]:
    """Scheme, body and options of a data URI. Raises DataError for an unknown scheme or invalid options.

    A question mark of a path is written ``%3F``, and what reads as that ``%253F``; other percent signs are themselves.
    """
    address, _, query = uri.partition("?")
    scheme, _, body = address.partition(":")
    body = re.sub("%(25)?((?:25)*3[Ff])", lambda found: f"%{found[2]}" if found[1] else "?", body)
    if scheme not in SCHEMES:
        known = f"unknown data source {scheme!r}; known are {', '.join(sorted(SCHEMES))}"
        meant = f"; write folder:{address} for folders of images" if Path(address).is_dir() else ""
        raise DataError(f"{uri}: {known}{meant}.")
    return scheme, body, SCHEMES[scheme].options.parse(uri, query, role)


def open_whole(scheme: str, body: str, options: Options) -> Source:
    """The data set before the common options are applied."""
    source = SCHEMES[scheme].open(body, options)
    try:
        for name in source.class_names:
            expect_visible(name)
    except ValueError as error:
        raise DataError(f"{options.uri}: the class name {error}; rename its folder or label.") from None
    return source


def cut(scheme: str, source: Source, options: Options, known: Parts | None = None) -> Source:
    """Apply the common options to ``source``, the whole data set."""
    return apply_common(source, options.model_copy(update=dict.fromkeys(SCHEMES[scheme].at_opening)), known)


def check_filled(source: Source, role: Role = "trainer") -> None:
    """Raise DataError if a split has no image; evaluators need no training images."""
    for name, split in (("train", source.train), ("test", source.test)):
        if not len(split) and (name == "test" or role == "trainer"):
            raise DataError(f"{source.uri}: no image is left in {name}.")


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
        kind = SCHEMES[scheme]
        cutting = Options.own() - {"split_seed", *kind.at_opening}  # what does not describe the whole data set
        own = options.model_dump(exclude_unset=True, exclude={*cutting, *Use.model_fields})
        whole_test = kind.of_files and options.is_whole_test
        key = scheme, body, tuple(own.items()), kind.of_files and options.role == "evaluator", whole_test
        if key not in self._wholes:
            self._wholes[key] = _Whole(open_whole(scheme, body, options))
        return self._wholes[key]


# Gains on held-out training images, in points: fedtaskres 25.9, fedclipadapter 20.0, plan 16.8, fedlp 14.8, promptfl
# 9.4, fedclip 5.4 (`promptfed tune` with these methods on a run file of the same federation). By themselves with one
# seed: plan, and fedlora 23.3, which take seven and ten times as long.
# `others` is what `promptfed demo --method NAME --json` reports.
