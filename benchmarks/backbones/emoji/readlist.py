"""The list of the pictures that promptfed-emoji was trained on, and a test for near copies of them."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.backbones.emoji.corpus import read_cells
from promptfed.shared.data.emoji import store
from promptfed.shared.data.emoji.splits import splits

FILE = Path(__file__).parent / "read.txt.gz"
NEAR_BITS = 5
"""Pictures are near copies if at most so many of the 64 bits of their hashes differ and their colours are near."""
NEAR_COLOUR = 14
_SIDE = 32
_WAVES = np.cos(np.pi / _SIDE * np.outer(np.arange(8), np.arange(_SIDE) + 0.5))  # of the discrete cosine transform


@dataclass(frozen=True)
class ReadList:
    """Pictures that were read: style and name, hex digest of the encoding, hashes (N, 64), mean colours (N, 3)."""

    cells: list[tuple[str, str]]
    digests: list[str]
    bits: np.ndarray
    colours: np.ndarray

    def near(self, image: Image.Image) -> list[int]:
        """Rows of the pictures of which this one is a near copy."""
        bits, colour = perceptual(image)
        close = (self.bits != bits).sum(1) <= NEAR_BITS
        alike = np.abs(self.colours.astype(int) - colour).max(1) <= NEAR_COLOUR
        return np.flatnonzero(close & alike).tolist()


def perceptual(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """A picture's perceptual hash (64,) bool and mean colour (3,).

    The bits say which of the 8 x 8 lowest frequencies are above their median.

    After Zauner (2010), "Implementation and Benchmarking of Perceptual Image Hash Functions", section 3.2.1.
    """
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.float64)
    low = (_WAVES @ grey @ _WAVES.T).ravel()
    low[0] = 0.0  # the brightness does not depend on the shape
    colour = np.asarray(image.convert("RGB").resize((1, 1), Image.Resampling.BOX)).reshape(3)
    return low > np.median(low[1:]), colour.astype(int)


def write_read_list(folder: Path, out: Path) -> None:
    """Write a line for each picture: style, digest (16 hex digits), hash (16), mean colour (6), name."""
    drawn = store.read(folder)
    lines = []
    for style, place in read_cells(drawn, splits()):
        bits, colour = perceptual(drawn.image(style, place))
        mark, digest = np.packbits(bits).tobytes().hex(), drawn.digest(style, place)[:16]
        lines.append(f"{style} {digest} {mark} {bytes(colour.tolist()).hex()} {drawn.things[place].name}\n")
    with out.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write("".join(lines).encode())


def read_list(path: Path = FILE) -> ReadList:
    """The list of a file; by default the one in this folder."""
    rows = [line.split(" ", 4) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    bits = np.frombuffer(bytes.fromhex("".join(row[2] for row in rows)), dtype=np.uint8).reshape(-1, 8)
    colours = np.frombuffer(bytes.fromhex("".join(row[3] for row in rows)), dtype=np.uint8).reshape(-1, 3)
    cells = [(row[0], row[4]) for row in rows]
    return ReadList(cells, [row[1] for row in rows], np.unpackbits(bits, axis=1).astype(bool), colours)
