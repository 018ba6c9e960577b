"""The emoji that are shipped: things, styles, and their pictures. ``embedded/NOTICE.txt`` has their licences."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from promptfed.shared.data.source import DataError

SIZE = 64
"""Side of a picture in pixels."""
INDEX = "index.json"
FOLDER = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Style:
    """One style of a designer. Styles whose drawings are derived from one another share a ``family``."""

    name: str
    family: str
    wording: str


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("flat", "microsoft", "a flat colour icon of a {}"),
        Style("three", "microsoft", "a glossy 3d render of a {}"),
        Style("contrast", "microsoft", "a black stencil icon of a {}"),
        Style("noto", "google", "a shaded cartoon of a {}"),
        Style("notov1", "google", "an old rounded cartoon of a {}"),
        Style("notomono", "google", "a thin black line icon of a {}"),
        Style("fxemoji", "mozilla", "a muted flat drawing of a {}"),
    )
}


@dataclass(frozen=True)
class Thing:
    """One code point or sequence of code points, with its name and its kind in words.

    ``testable``: it is a thing, not a sign, and its drawing is not nearly equal to another one.
    """

    code: str
    name: str
    group: str
    kind: str
    testable: bool


@dataclass(frozen=True)
class Drawn:
    """All pictures: its things, and the encoded pictures of each style by the thing's index."""

    things: tuple[Thing, ...]
    styles: dict[str, dict[int, bytes]]

    def image(self, style: str, place: int) -> Image.Image:
        """One picture, RGB, on white."""
        with Image.open(io.BytesIO(self.styles[style][place])) as image:
            return image.convert("RGB")


@lru_cache(maxsize=1)
def read(folder: Path = FOLDER) -> Drawn:
    """Read and verify the pictures. Raises DataError if they are incomplete or changed."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        things = tuple(Thing(**thing) for thing in index["things"])
        styles = {name: _style(folder / f"{name}.webps", told) for name, told in index["styles"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} holds no emoji; install promptfed again.") from error
    return Drawn(things, styles)


def _style(file: Path, told: dict[str, Any]) -> dict[int, bytes]:
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise DataError(f"{file} is not what its index says; install promptfed again.")
    places = [place for first, last in told["things"] for place in range(first, last + 1)]
    return dict(zip(places, _pictures(content), strict=True))


def _pictures(content: bytes) -> list[bytes]:
    """Split concatenated WebP files; each contains its length in the four bytes after ``RIFF``."""
    files, start = [], 0
    while start < len(content):
        end = start + 8 + struct.unpack_from("<I", content, start + 4)[0]
        files.append(content[start:end])
        start = end
    return files
