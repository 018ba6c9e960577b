"""Opens the source of a data URI. A new kind of source needs one more row in ``SCHEMES``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from promptfed.shared.data.digits import open_digits
from promptfed.shared.data.emoji.scenes import open_scenes
from promptfed.shared.data.emoji.source import open_emoji
from promptfed.shared.data.folder import open_csv, open_folder
from promptfed.shared.data.hugging_face import open_hugging_face
from promptfed.shared.data.medical.schemes import open_dicom
from promptfed.shared.data.options import Options, Parts, Role, apply_common
from promptfed.shared.data.source import DataError, Source
from promptfed.shared.data.symbols import open_symbols
from promptfed.shared.data.torchvision_sets import open_torchvision
from promptfed.shared.data.union import SCHEME as UNION
from promptfed.shared.data.union import open_union
from promptfed.shared.plain_text import alike_text

log = logging.getLogger("promptfed.data")

SCHEMES: dict[str, Callable[[str, Options], Source]] = {
    "symbols": open_symbols,
    "digits": open_digits,
    "emoji": open_emoji,
    "emoji-scenes": open_scenes,
    "folder": open_folder,
    "csv": open_csv,
    "dicom": open_dicom,
    "torchvision": open_torchvision,
    "hf": open_hugging_face,
    UNION: lambda body, options: open_union(body, options, lambda uri: _part(uri, options)),
}
"""Opener by scheme: what stands between the colon and the question mark, and the options -> the whole source."""

_CLASSES = frozenset({"only", "min_per_class"})
AT_OPENING = {"folder": _CLASSES, "csv": _CLASSES}
"""Common options that the opener of a scheme applies itself: a class left out may be as it likes."""

BY_ROLE = frozenset({"folder", "csv", "dicom", UNION})
"""Schemes that give an evaluator other images than a trainer."""

REDRAWN = frozenset({"symbols"})
"""Schemes whose test images are drawn: ``test_seed=`` draws others. Elsewhere the test images are what there is."""


def open_source(uri: str, role: Role = "trainer") -> Source:
    """Open the source ``scheme:body?option=value`` for a trainer or an evaluator, with its options applied.

    Raises:
        DataError: the scheme or an option is unknown, a value is invalid, or the data cannot be used.
    """
    scheme, body, options = parse_uri(uri, role)
    source = cut(scheme, open_whole(scheme, body, options), options)
    check_filled(source, role)
    tell_look_alikes(uri, source.class_names)
    return source


def class_names_of(uri: str, role: Role = "trainer") -> tuple[str, ...]:
    """The class names of the source ``uri``, without reading its images. Raises DataError as `open_source`."""
    scheme, body, options = parse_uri(uri, role)
    options = replace(options, names_only=True)
    names = cut(scheme, open_whole(scheme, body, options), options).class_names
    tell_look_alikes(uri, names)
    return names


@lru_cache(64)
def tell_look_alikes(uri: str, names: tuple[str, ...]) -> None:
    """Log, once for each source, the class names that people or text towers take for one."""
    if text := alike_text(names):
        log.warning("%s: these class names look alike: %s; rename them, or merge classes that are one", uri, text)


def parse_uri(uri: str, role: Role = "trainer") -> tuple[str, str, Options]:
    """Scheme, body and options of a data URI. Raises DataError for an unknown scheme or invalid options.

    A question mark of a path is written ``%3F``, and what reads as that ``%253F``; other percent signs are themselves.
    """
    address, _, query = uri.partition("?")
    scheme, _, body = address.partition(":")
    if scheme != UNION:  # whose parts are percent-encoded whole
        body = re.sub("%(25)?((?:25)*3[Ff])", lambda found: f"%{found[2]}" if found[1] else "?", body)
    if scheme not in SCHEMES:
        known = f"unknown data source {scheme!r}; known are {', '.join(sorted(SCHEMES))}"
        meant = f"; write folder:{address} for folders of images" if Path(address).is_dir() else ""
        raise DataError(f"{uri}: {known}{meant}.")
    return scheme, body, Options.parse(uri, query, role)


def open_whole(scheme: str, body: str, options: Options) -> Source:
    """The data set before the common options are applied."""
    source = SCHEMES[scheme](body, options)
    for name in source.class_names:
        if not name.isascii() and name != name.encode(errors="replace").decode():
            raise DataError(f"{options.uri}: the class name {name!a} is not UTF-8; rename its folder.")
    return source


def cut(scheme: str, source: Source, options: Options, known: Parts | None = None) -> Source:
    """Apply the common options to ``source``, the whole data set."""
    return apply_common(source, options.without(AT_OPENING.get(scheme, ())), known)


def _part(uri: str, options: Options) -> Source:
    """One source of a union, opened for the same role as the union."""
    scheme, body, own = parse_uri(uri, options.role)
    own = replace(own, names_only=options.names_only)
    source = cut(scheme, open_whole(scheme, body, own), own)
    check_filled(source, options.role)
    return source


def check_filled(source: Source, role: Role = "trainer") -> None:
    """Raise DataError if a split has no image; evaluators need no training images."""
    for name, split in (("train", source.train), ("test", source.test)):
        if not len(split) and (name == "test" or role == "trainer"):
            raise DataError(f"{source.uri}: no image is left in {name}.")
