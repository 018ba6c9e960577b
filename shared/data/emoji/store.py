"""A folder of drawn styles: ``index.json`` and, for each style, one file of concatenated WebP pictures."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from promptfed.shared.data.emoji.styles import SIZE
from promptfed.shared.data.emoji.things import Thing
from promptfed.shared.data.source import DataError

INDEX = "index.json"
FORMAT = 1
QUALITY = 75


@dataclass(frozen=True)
class Drawn:
    """The contents of a folder: its things, and the encoded pictures of each style by the thing's index."""

    things: tuple[Thing, ...]
    styles: dict[str, dict[int, bytes]]

    def image(self, style: str, place: int) -> Image.Image:
        """One picture, RGB, on white."""
        with Image.open(io.BytesIO(self.styles[style][place])) as image:
            return image.convert("RGB")

    def digest(self, style: str, place: int) -> str:
        """SHA-256 (hex) of one encoded picture."""
        return hashlib.sha256(self.styles[style][place]).hexdigest()


def encoded(image: Image.Image) -> bytes:
    """The picture (SIZE, SIZE) on white as WebP."""
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    out = io.BytesIO()
    paper.convert("RGB").save(out, "WEBP", quality=QUALITY, method=6)
    return out.getvalue()


def write(folder: Path, drawn: Drawn, sources: Iterable[dict[str, str]]) -> None:
    """Write everything except the notices. The index is written last: a folder without one is incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    styles: dict[str, Any] = {}
    for name, by_place in drawn.styles.items():
        places = sorted(by_place)
        content = b"".join(by_place[place] for place in places)
        (folder / f"{name}.webps").write_bytes(content)
        styles[name] = {"sha256": hashlib.sha256(content).hexdigest(), "things": _runs(places)}
    index = {
        "format": FORMAT,
        "size": SIZE,
        "sources": list(sources),
        "styles": styles,
        "things": [asdict(thing) for thing in drawn.things],
    }
    lines = json.dumps(index, indent=1, ensure_ascii=False)
    (folder / INDEX).write_text(lines + "\n", encoding="utf-8")


@lru_cache(maxsize=4)
def read(folder: Path) -> Drawn:
    """Read and verify the folder's contents. Raises DataError if they are incomplete or changed."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if (index["format"], index["size"]) != (FORMAT, SIZE):
            raise DataError(f"{folder} was written by another version; make it again: promptfed data emoji --out DIR.")
        things = tuple(Thing(**thing) for thing in index["things"])
        styles = {name: _style(folder / f"{name}.webps", told) for name, told in index["styles"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} holds no drawn emoji; make them with promptfed data emoji --out DIR.") from error
    return Drawn(things, styles)


def _style(file: Path, told: dict[str, Any]) -> dict[int, bytes]:
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise DataError(f"{file} is not what its index says; make the folder again: promptfed data emoji --out DIR.")
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


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as runs: the first and the last number of each."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place - 1:
            runs[-1] = (runs[-1][0], place)
        else:
            runs.append((place, place))
    return runs
