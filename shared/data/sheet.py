"""A contact sheet of a split, for a quick look at a data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageOps

from promptfed.shared.data.partition import class_counts, strata
from promptfed.shared.data.source import Split

_SIDE, _TEXT, _COLUMNS, _LETTERS = 64, 14, 12, 11


def contact_sheet(split: Split, class_names: Sequence[str], count: int) -> Image.Image:
    """``count`` images, one class after the other, each above its class name and the class's number of images."""
    of_class = class_counts(split.labels, len(class_names))
    classes = strata(split.labels)  # of several classes of an image, the rarest
    rows = spread(classes, count)
    columns = min(_COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    sheet = Image.new("RGB", (columns * (_SIDE + 8) + 8, lines * (_SIDE + _TEXT + 8) + 8), "white")
    pen = ImageDraw.Draw(sheet)
    for at, row in enumerate(rows):
        left, top = 8 + at % columns * (_SIDE + 8), 8 + at // columns * (_SIDE + _TEXT + 8)
        sheet.paste(ImageOps.pad(split.image(row), (_SIDE, _SIDE), color="white"), (left, top))
        label = int(classes[row])
        if not 0 <= label < len(class_names):
            continue
        number = f" {of_class[label]}"
        pen.text((left, top + _SIDE + 1), class_names[label][: _LETTERS - len(number)] + number, fill="black")
    return sheet


def spread(labels: torch.Tensor, count: int) -> list[int]:
    """At most ``count`` rows: the first of every class, then the second of every class, and so on."""
    seen: dict[int, int] = {}
    turns = []
    for row, label in enumerate(labels.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, row))
    return [row for _, _, row in sorted(turns)[:count]]
