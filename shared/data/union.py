"""``union:URI,URI``: the images of several sources for one client; each URI is percent-encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from urllib.parse import unquote

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, Source, joined

SCHEME = "union"


def open_union(body: str, options: Options, open_one: Callable[[str], Source]) -> Source:
    """Open the concatenated training images and the concatenated test images of all sources.

    Raises:
        DataError: a part cannot be used, the parts have different classes, or a group would be trained and tested on.
    """
    options.check_names(())
    parts = [open_one(unquote(uri)) for uri in body.split(",") if uri]
    if not parts:
        raise DataError(f"{options.uri}: names no source; write union:URI,URI with each URI percent-encoded.")
    names = parts[0].class_names
    for part in parts[1:]:
        if part.class_names != names:
            raise DataError(f"{options.uri}: {part.uri} has other classes than {parts[0].uri}.")
    _check_groups(parts, options)
    train, test = joined(*(part.train for part in parts)), joined(*(part.test for part in parts))
    left_out = tuple(text for part in parts for text in part.left_out)
    return Source(options.uri, names, None, parts[0].template, train, test, left_out=left_out)


def _check_groups(parts: Sequence[Source], options: Options) -> None:
    """Raise DataError if only some parts know their groups, or if one part trains on a group that another tests on."""
    if len({split.groups is None for part in parts for split in (part.train, part.test)}) > 1:
        raise DataError(f"{options.uri}: some sources have groups, such as patients, and others none; give all group=.")
    for first, second in permutations(parts, 2):
        both = sorted(set(first.train.groups or ()) & set(second.test.groups or ()))
        if both and not options.names_only:
            text = f"{first.uri} trains on the group {both[0]}, and {second.uri} tests on it"
            raise DataError(f"{options.uri}: {text}; give the splits in both, or both as one folder or table.")
