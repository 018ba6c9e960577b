"""Classes that ``only=`` and ``min_per_class=`` keep."""

from __future__ import annotations

import pytest

from promptfed.shared.data import DataError
from promptfed.shared.data.cutting import kept_names
from promptfed.shared.data.options import SymbolsOptions

NAMES, COUNTS = ["bird", "cat", "zebra"], {"bird": 3, "zebra": 2}


def options(**given: object) -> SymbolsOptions:
    return SymbolsOptions.model_validate({"uri": "symbols:neon"} | given)


@pytest.mark.parametrize(
    ("only", "least", "kept"),
    [
        (None, None, NAMES),
        ("zebra,bird", None, ["bird", "zebra"]),
        (None, 1, ["bird", "zebra"]),
        (None, 2, ["bird", "zebra"]),
        (None, 3, ["bird"]),
        ("zebra,cat", 2, ["zebra"]),
    ],
)
def test_classes_are_kept_in_their_order(only: str | None, least: int | None, kept: list[str]) -> None:
    given = {"only": only, "min_per_class": least}
    assert kept_names(NAMES, COUNTS, options(**{key: one for key, one in given.items() if one is not None})) == kept


@pytest.mark.parametrize(
    ("only", "least", "words"),
    [
        (None, 4, "min_per_class=4 leaves no class; the largest has 3 images"),
        ("cat", 1, "min_per_class=1 leaves no class"),
        ("bird,cow", None, "only= names the class 'cow', which is not one of its classes"),
    ],
)
def test_no_class_is_refused(only: str | None, least: int | None, words: str) -> None:
    given = {"only": only, "min_per_class": least}
    with pytest.raises(DataError, match=words):
        kept_names(NAMES, COUNTS, options(**{key: one for key, one in given.items() if one is not None}))


def test_without_images_the_largest_has_none() -> None:
    with pytest.raises(DataError, match="the largest has 0 images"):
        kept_names(NAMES, {}, options(min_per_class=1))
