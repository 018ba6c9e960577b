"""Small pictures of one's own, drawn: every class is a shape in a colour, every domain a way of drawing it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "cross", "bar")
SIDE = 48


def write_scenes(root: Path, count: int, seed: int = 0) -> Path:
    """A table ``labels.csv`` with any number of `SHAPES` in each of ``count`` pictures, two of each patient.

    A few labels are unknown; ``scanner`` is old or new.
    """
    draws = np.random.default_rng(seed)
    (root / "images").mkdir(parents=True, exist_ok=True)
    lines = [",".join(("path", "patient", "scanner", *SHAPES))]
    for number in range(count):
        present = draws.random(len(SHAPES)) < 0.4
        image = Image.new("RGB", (2 * SIDE, 2 * SIDE), (230, 230, 220))
        for at in np.flatnonzero(present):
            own = picture(SHAPES[at], 1000 * seed + number)
            image.paste(own, (SIDE * (int(at) % 2), SIDE * (int(at) // 2)))
        image.save(root / "images" / f"{number}.png")
        cells = ["" if draws.random() < 0.03 else str(int(own)) for own in present]
        lines.append(",".join((f"images/{number}.png", f"p{number // 2}", ("old", "new")[number // 2 % 2], *cells)))
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def picture(shape: str, seed: int, domain: str = "filled") -> Image.Image:
    """One drawing, RGB, `SIDE` pixels; ``seed`` moves it and chooses its colours."""
    draws = np.random.default_rng([seed, SHAPES.index(shape)])
    left, top, size = (int(draws.integers(low, high)) for low, high in ((2, 14), (2, 14), (20, 32)))
    paper, ink = (tuple(int(value) for value in draws.integers(low, low + 90, 3)) for low in (160, 0))
    if domain == "negative":
        paper, ink = ink, paper
    image = Image.new("RGB", (SIDE, SIDE), paper)
    pen = ImageDraw.Draw(image)
    box = (left, top, left + size, top + size)
    filled = {"fill": ink} if domain != "outline" else {"outline": ink, "width": 3}
    if shape == "circle":
        pen.ellipse(box, **filled)
    elif shape == "square":
        pen.rectangle(box, **filled)
    elif shape == "bar":
        pen.rectangle((left, top + size // 3, left + size, top + 2 * size // 3), **filled)
    else:
        pen.line(box, fill=ink, width=5)
        pen.line((box[0], box[3], box[2], box[1]), fill=ink, width=5)
    return image


def tiff_with_a_fraction_as_an_offset() -> bytes:
    """A TIFF that says where its pixels are by a float, for which PIL raises TypeError."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "TIFF")
    content = bytearray(file.getvalue())
    tags = int.from_bytes(content[4:8], "little") + 2
    places = range(tags, len(content) - 12, 12)
    offsets = next(place for place in places if int.from_bytes(content[place : place + 2], "little") == 273)
    content[offsets + 2 : offsets + 4] = (11).to_bytes(2, "little")
    return bytes(content)


def write_folder(
    root: Path, counts: Mapping[str, int] | Sequence[str] = SHAPES, domain: str = "filled", seed: int = 0, each: int = 6
) -> Path:
    """A folder for each class under ``root``, with so many pictures (``each`` where only names are given)."""
    named = counts if isinstance(counts, Mapping) else dict.fromkeys(counts, each)
    for shape, count in named.items():
        folder = root / shape
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture(shape, 1000 * seed + number, domain).save(folder / f"{number}.png")
    return root
