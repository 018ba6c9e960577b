"""From a data URI to its source. Another kind of source is one more row in ``SCHEMES``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from promptfed.shared.data.digits import open_digits
from promptfed.shared.data.emoji.source import open_emoji
from promptfed.shared.data.folder import open_csv, open_folder
from promptfed.shared.data.hugging_face import open_hugging_face
from promptfed.shared.data.options import Options, apply_common
from promptfed.shared.data.source import DataError, Source
from promptfed.shared.data.symbols import open_symbols
from promptfed.shared.data.torchvision_sets import open_torchvision
from promptfed.shared.data.union import SCHEME as UNION
from promptfed.shared.data.union import open_union

SCHEMES: dict[str, Callable[[str, Options], Source]] = {
    "symbols": open_symbols,
    "digits": open_digits,
    "emoji": open_emoji,
    "folder": open_folder,
    "csv": open_csv,
    "torchvision": open_torchvision,
    "hf": open_hugging_face,
    UNION: lambda body, options: open_union(body, options, open_source),
}
"""Opener by scheme: what stands between the colon and the question mark, and the options -> the whole source."""

REDRAWN = frozenset({"symbols"})
"""Schemes whose test images are drawn: ``test_seed=`` draws others. Elsewhere the test images are what there is."""


def open_source(uri: str) -> Source:
    """The source that ``scheme:body?option=value`` names, cut as its options say.

    Raises DataError, one sentence, for an unknown scheme, an unknown or bad option, and data that cannot be used.
    """
    scheme, body, options = parse_uri(uri)
    source = apply_common(open_whole(scheme, body, options), options)
    check_filled(source)
    return source


def parse_uri(uri: str) -> tuple[str, str, Options]:
    """Scheme, body and options of a data URI. Raises DataError for an unknown scheme and unreadable options."""
    address, _, query = uri.partition("?")
    scheme, _, body = address.partition(":")
    if scheme not in SCHEMES:
        known = f"unknown data source {scheme!r}; known are {', '.join(sorted(SCHEMES))}"
        meant = f"; write folder:{address} for folders of images" if Path(address).is_dir() else ""
        raise DataError(f"{uri}: {known}{meant}.")
    return scheme, body, Options.parse(uri, query)


def open_whole(scheme: str, body: str, options: Options) -> Source:
    """The data set before the options that mean the same for every source cut it."""
    return SCHEMES[scheme](body, options)


def check_filled(source: Source) -> None:
    """DataError where a split holds no image."""
    for name, split in (("train", source.train), ("test", source.test)):
        if not len(split):
            raise DataError(f"{source.uri}: no image is left in {name}.")
