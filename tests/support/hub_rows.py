"""A split as the library `datasets` gives it: kinds of columns by name; a column, or a row, by its key."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image


class Image:
    """The kind of a column."""


class Value:
    """The kind of a column."""


class ClassLabel:
    """The kind of a column of labels."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = list(names)


class Rows:
    """A split."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self.rows = features, rows

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self.rows[key]
        if key not in self.features:
            raise KeyError(f"Column {key} not in the dataset. Current columns in the dataset: {list(self.features)}")
        return [row[key] for row in self.rows]


def grey(shade: int) -> PIL.Image.Image:
    """A small picture of one shade."""
    return PIL.Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8))
