"""Images on disk: the formats that are read, advice on converting others, and a bound on the memory of huge images."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from promptfed.shared.data.source import DataError
from promptfed.shared.files import NotAFile, open_file

# That are read at all, here and where a client answers: a decoder that nobody needs is one to attack.
IMAGE_FORMATS = ("PNG", "JPEG", "JPEG2000", "WEBP", "BMP", "TIFF", "GIF", "PPM")

LARGE = 32_000_000  # pixels of an image above which it is read smaller: towers take a few hundred on a side
SHRUNK = 16_000_000  # pixels that are left of it, about
LEAST_SIDE = 512  # pixels of the shorter side that shrinking leaves
_STRIP = 256  # rows of the shrunk image that are made at once

_HEAD = 512  # bytes of a file in which its format shows
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


def read_image(path: Path) -> Image.Image:
    """The decoded image, RGB; one of more than `LARGE` pixels is made smaller while it is read.

    Raises:
        DataError: it cannot be read as an image: the file's name, and how to convert it where its format is known.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such an image is shrunk
            with open_file(path) as file, Image.open(file, formats=IMAGE_FORMATS) as image:
                return image.convert("RGB") if image.width * image.height <= LARGE else _shrunk(image)
    except NotAFile as error:
        raise DataError(f"{path} cannot be read as an image: {error}; remove it.") from error
    except UnidentifiedImageError as error:
        advice = _conversion(path)
        if advice is not None:
            raise DataError(f"{path} cannot be read as an image: {advice}.") from error
        raise DataError(f"{path} cannot be read as an image; repair or remove it ({error}).") from error
    except Image.DecompressionBombError as error:
        made = f"{path.stem}-small{path.suffix}"
        advice = f"make it smaller, as in: magick {path.name} -resize 2048x2048 {made}"
        raise DataError(f"{path} cannot be read as an image: it has too many pixels; {advice} ({error}).") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an image; repair or remove it ({error}).") from error


def _shrunk(image: Image.Image) -> Image.Image:
    """RGB of about `SHRUNK` pixels, without a second copy of the whole: what a strip becomes takes its place."""
    factor = min(math.ceil(math.sqrt(image.width * image.height / SHRUNK)), min(image.size) // LEAST_SIDE)
    if factor < 2:
        return image.convert("RGB")
    if image.format == "JPEG":  # its decoder gives a half, a quarter or an eighth of the size without the rest
        image.draft("RGB", (image.width // factor, image.height // factor))
        return image.convert("RGB")
    size = math.ceil(image.width / factor), math.ceil(image.height / factor)
    small = Image.new("RGB", size)
    for top in range(0, size[1], _STRIP):
        bottom = min((top + _STRIP) * factor, image.height)
        strip = image.crop((0, top * factor, image.width, bottom)).convert("RGB").reduce(factor)
        small.paste(strip, (0, top))
    return small


def _conversion(path: Path) -> str | None:
    """What the file is and how to make a PNG of it, where its first bytes or its name tell."""
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
