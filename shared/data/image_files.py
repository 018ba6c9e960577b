"""Images on disk: accepted formats, advice on converting others, and a memory bound for huge images."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from promptfed.shared import machine
from promptfed.shared.data.errors import DataError
from promptfed.shared.data.pixels import UNREADABLE, Grey, in_rgb
from promptfed.shared.files import NotAFile, open_file
from promptfed.shared.service.reasons import why

# Accepted formats, also of a client's service. Unneeded decoders only add attack surface.
IMAGE_FORMATS = ("PNG", "JPEG", "JPEG2000", "WEBP", "BMP", "TIFF", "GIF", "PPM")

LARGE = 32_000_000  # images with more pixels are scaled down on reading; towers need a few hundred pixels a side
SHRUNK = 16_000_000  # approximate number of pixels after scaling down
LEAST_SIDE = 512  # least pixels of the shorter side after scaling down
LONG = 4  # times as long as it is wide: from there on an image is a line
MOST_RATIO = 100  # of an image's longer side to its shorter one, before a backbone's preprocessing

READERS = min(8, machine.processors())  # threads that read images beside each other

_HEAD = 512  # leading bytes of a file that identify its format
_BY_MAGICK = "convert it, as in: magick {0}{1} {0}.png"
_CONVERSIONS = {
    "SVG": "draw it, as in: rsvg-convert -w 512 {0}{1} -o {0}.png",
    "PDF": "draw its page, as in: pdftoppm -png -singlefile {0}{1} {0}",
    "PostScript": "draw it, as in: gs -sDEVICE=png16m -r150 -o {0}.png {0}{1}",
    "HEIC": "convert it, as in: heif-convert {0}{1} {0}.png",
    "AVIF": "convert it, as in: avifdec {0}{1} {0}.png",
    "DICOM": "convert it, as in: dcm2pnm +on {0}{1} {0}.png",
    "a camera's raw format": "develop it, as in: darktable-cli {0}{1} {0}.png",
}
_RAW = frozenset({".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf"})


def read_image(path: Path, grey: Grey | None = None) -> Image.Image:
    """The image as `in_rgb` shows it; an image of more than `LARGE` pixels is scaled down while it is read.

    Raises:
        DataError: the file cannot be read as an image. The text says how to convert it if its format is known.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # of large images, and of damaged notes
            with open_file(path) as file, Image.open(file, formats=IMAGE_FORMATS) as image:
                return in_rgb(image, grey=grey) if image.width * image.height <= LARGE else shrunk(image, grey)
    except NotAFile as error:
        raise DataError(f"{path} cannot be read as an image: {error}; remove it.") from error
    except UnidentifiedImageError as error:
        advice = conversion_of(path)
        if advice is not None:
            raise DataError(f"{path} cannot be read as an image: {advice}.") from error
        raise DataError(f"{path} cannot be read as an image; repair or remove it (no known format).") from error
    except Image.DecompressionBombError as error:
        made = f"{path.stem}-small{path.suffix}"
        advice = f"make it smaller, as in: magick {path.name} -resize 2048x2048 {made}"
        raise DataError(f"{path} cannot be read as an image: it has too many pixels; {advice} ({error}).") from error
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as an image; repair or remove it ({why(error)}).") from error


def shrunk(image: Image.Image, grey: Grey | None = None) -> Image.Image:
    """The image as `in_rgb` shows it, of about `SHRUNK` pixels."""
    factor = min(math.ceil(math.sqrt(image.width * image.height / SHRUNK)), min(image.size) // LEAST_SIDE)
    if factor < 2:
        return in_rgb(image, grey=grey)
    if image.format == "JPEG":  # the JPEG decoder can decode directly to a half, a quarter or an eighth of the size
        image.draft("RGB", (image.width // factor, image.height // factor))
        return in_rgb(image)
    return in_rgb(image, factor, grey)


def image_digest(image: Image.Image) -> str:
    """SHA-256 (hex) of an image's size and decoded RGB bytes: equal pixels have equal digests in any file format."""
    digest = hashlib.sha256(f"{image.width}x{image.height}|".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def middle(image: Image.Image) -> Image.Image:
    """An image without the ends of one that is longer than `MOST_RATIO`.

    Most preprocessings scale the shorter side and keep the middle: of a line of a million pixels they would make a
    billion, and then use the middle.
    """
    most = MOST_RATIO * min(image.size)
    if max(image.size) <= most:
        return image
    left, top = (max(0, size - most) // 2 for size in image.size)
    return image.crop((left, top, left + min(image.width, most), top + min(image.height, most)))


@dataclass(frozen=True)
class Cut:
    """What a backbone's preprocessing does with an image before it makes numbers of it: scale it, cut out its middle.

    ``scale``: its shorter side, or its (height, width); ``crop``: (height, width); ``resample``: PIL's filter.
    """

    scale: int | tuple[int, int]
    crop: tuple[int, int]
    resample: int

    def pixels(self, image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """``(3, H, W)`` uint8, bit for bit those of torchvision's Resize and CenterCrop."""
        image = middle(image)
        if isinstance(self.scale, int):
            short, long = self.scale, int(self.scale * max(image.size) / min(image.size))
            width, height = (short, long) if image.width <= image.height else (long, short)
        else:
            height, width = self.scale
        left, top = round((width - self.crop[1]) / 2.0), round((height - self.crop[0]) / 2.0)
        box = left, top, left + self.crop[1], top + self.crop[0]
        resample = Image.Resampling(self.resample)
        # Rows first, as PIL does, so that fewer columns follow: not of a line, whose rows alone would take much memory.
        if image.mode == "RGB" and self.crop[1] < width <= LONG * self.crop[1]:
            image = image.resize((width, image.height), resample).crop((left, 0, left + self.crop[1], image.height))
            width, box = self.crop[1], (0, top, self.crop[1], top + self.crop[0])
        image = image.resize((width, height), resample)
        image = image if image.size == self.crop[::-1] else image.crop(box)
        return np.ascontiguousarray(
            np.asarray(image.convert("RGB") if image.mode != "RGB" else image).transpose(2, 0, 1)
        )


def conversion_of(path: Path) -> str | None:
    """The file's format and how to convert it to PNG, if its first bytes or its name identify it."""
    kind = _kind(path)
    if kind is None:
        return None
    return f"it is {kind}; " + _CONVERSIONS.get(kind, _BY_MAGICK).format(path.stem, path.suffix)


def _kind(path: Path) -> str | None:
    try:
        with open_file(path) as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    if b"<svg" in head or (path.suffix.lower() in (".svg", ".svgz") and head[:2] in (b"<?", b"<!", b"\x1f\x8b")):
        return "SVG"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return "AVIF" if brand in (b"avif", b"avis") else "HEIC" if brand[:3] in (b"hei", b"hev", b"mif") else None
    if head[128:132] == b"DICM":
        return "DICOM"
    starts = {b"%PDF": "PDF", b"%!PS": "PostScript", b"8BPS": "PSD", b"\x00\x00\x01\x00": "ICO", b"DDS ": "DDS"}
    for start, kind in starts.items():
        if head.startswith(start):
            return kind
    return "a camera's raw format" if path.suffix.lower() in _RAW else None
