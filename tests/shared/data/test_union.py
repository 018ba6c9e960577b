"""One client with the images of several sources."""

from __future__ import annotations

import pytest

from promptfed.shared.data import DataError, Split, open_source
from tests.support.own_images import union_uri


def digests(split: Split) -> list[str]:
    return [split.digest(row) for row in range(len(split))]


def test_a_union_has_all_images_of_its_parts() -> None:
    uris = ["symbols:sketch?topic=games&per_class=2&test_per_class=1", "symbols:neon?topic=games&per_class=3&shots=2"]
    whole, parts = open_source(union_uri(uris)), [open_source(uri) for uri in uris]
    for name in ("train", "test"):
        wanted = [digest for part in parts for digest in digests(getattr(part, name))]
        assert digests(getattr(whole, name)) == wanted
        labels = [label for part in parts for label in getattr(part, name).labels.tolist()]
        assert getattr(whole, name).labels.tolist() == labels
    assert whole.class_names == parts[0].class_names
    with pytest.raises(DataError, match="has other classes than"):
        open_source(union_uri([uris[0], "digits"]))
    with pytest.raises(DataError, match="names no source"):
        open_source("union:")
