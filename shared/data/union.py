"""``union:URI,URI``: the images of several sources for one client; each URI is percent-encoded (by `union_uri`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import quote, unquote

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, Source, joined

SCHEME = "union"


def union_uri(uris: Iterable[str]) -> str:
    """The URI of the union of ``uris``."""
    return f"{SCHEME}:" + ",".join(quote(uri, safe="") for uri in uris)


def open_union(body: str, options: Options, open_one: Callable[[str], Source]) -> Source:
    """Open the concatenated training images and the concatenated test images of all sources.

    Raises:
        DataError: a part cannot be used, or the parts have different classes.
    """
    options.check_names(())
    parts = [open_one(unquote(uri)) for uri in body.split(",") if uri]
    if not parts:
        raise DataError(f"{options.uri}: names no source; write union:URI,URI with each URI percent-encoded.")
    names = parts[0].class_names
    for part in parts[1:]:
        if part.class_names != names:
            raise DataError(f"{options.uri}: {part.uri} has other classes than {parts[0].uri}.")
    train, test = joined(*(part.train for part in parts)), joined(*(part.test for part in parts))
    return Source(options.uri, names, None, parts[0].template, train, test)
