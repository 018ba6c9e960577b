"""What an image of each depth and kind becomes: RGB of 8 bits. `docs/reference/data-uris.md` has the table."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from PIL import ExifTags, Image, ImageCms

from promptfed.shared.plain_text import scale_text

UNREADABLE = (OSError, SyntaxError, TypeError, ValueError)
"""Errors of PIL for damaged files."""

BACKGROUND = "white"  # behind what is transparent
STRIP = 256  # rows of a scaled image that are computed at once
_LOW = 16  # levels that 16-bit colours of 12 bits or fewer have left in 8
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}  # modes whose colours are multiplied by alpha
_COLOURED = ("RGB", "RGBA", "RGBa", "P", "PA", "CMYK", "YCbCr")  # modes whose embedded profile counts
_SAME = 2  # levels by which a profile's colours may differ from sRGB's and be taken for them
_CUBE = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * 3), -1).reshape(6, 36, 3)

Convert = Callable[[Image.Image], Image.Image]
Scale = tuple[float, float]
"""Which number of a grey picture of more than 8 bits is black, and which is white."""
Grey = tuple[float, ...]
"""A `Scale`, or what one number says: the bits of whole numbers, the largest one of fractions."""
GREY = "grey"  # under which an image's ``info`` has the scale that it was read by


class Unfaithful(ValueError):
    """An image cannot be shown faithfully in 8 bits; the text says why, and what to do."""


def in_rgb(image: Image.Image, factor: int = 1, grey: Grey | None = None) -> Image.Image:
    """The first frame of an opened image, upright, as sRGB of 8 bits; its sides are divided by ``factor``.

    ``grey``: the scale of grey pictures of more than 8 bits, by default by `bounds` of this one.

    Raises:
        Unfaithful: its values have no faithful place in 8 bits, or none in ``grey``.
        OSError, SyntaxError, TypeError, ValueError: the file is damaged.
    """
    depth = _bits_of_colours(image)
    image.load()
    numbers = _numbers(image)
    scale = None if numbers is None else _scale(image, numbers, grey)
    convert = _conversion(image, depth) if numbers is None or scale is None else _of_numbers(image, numbers, scale)
    shown = convert(image) if factor == 1 else _reduced(image, convert, factor)
    if convert is not _plain and _is_blank(shown) and (depth == 16 or not _is_blank(image)):
        raise Unfaithful("all its values would become equal; scale them, as in: magick IN -auto-level -depth 8 OUT")
    turn = _turn(image)
    upright = shown if turn is None else shown.transpose(turn)
    # A profile, a transparent colour or a note on the way up must not count again.
    upright.info = {} if scale is None else {GREY: scale}
    return upright


def _reduced(image: Image.Image, convert: Convert, factor: int) -> Image.Image:
    """Strips are converted and scaled in place, so that no second full copy exists."""
    size = -(-image.width // factor), -(-image.height // factor)
    small = Image.new("RGB", size)
    for top in range(0, size[1], STRIP):
        bottom = min((top + STRIP) * factor, image.height)
        strip = convert(image.crop((0, top * factor, image.width, bottom))).reduce(factor)
        small.paste(strip, (0, top))
    return small


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How a loaded image is turned upright, by EXIF or XMP. PIL has turned TIFF itself by then."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (*UNREADABLE, struct.error):  # damaged notes of a sound image
        return None


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Which of the numbers (H, W) is black and which white, by the numbers alone: the same in any file type.

    Whole numbers from 0 on are scaled from the fewest bits, at least 8, that hold the largest. Fractions are shares of
    white if all lie in 0 to 1, and levels if all lie in 0 to 255. All else goes from the least number to the largest.

    Raises:
        Unfaithful: no number is finite.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise Unfaithful("none of its pixels is a finite number")
    least, most = finite.min().item(), finite.max().item()
    if least < 0:
        return least, most
    if values.dtype.kind in "ui":
        return 0, (1 << max(8, int(most).bit_length())) - 1
    return (0, 1) if most <= 1 else (0, 255) if most <= 255 else (least, most)


def levels_between(values: np.ndarray, black: float, white: float) -> np.ndarray:
    """Levels (uint8) of numbers from ``black`` to ``white``, rounded to nearest; what is not a number is black."""
    shares = (np.nan_to_num(values.astype(np.float64), nan=black) - black) / ((white - black) or 1)
    levels: np.ndarray = np.floor(np.clip(shares, 0, 1) * 255 + 0.5).astype(np.uint8)
    return levels


def _conversion(image: Image.Image, depth: int) -> Convert:
    """What makes RGB of a loaded image of levels or colours, and of its strips."""
    if depth == 16:
        _check_deep_colours(image)
    profile = image.info.get("icc_profile") if image.mode in _COLOURED else None
    to_srgb = _to_srgb(profile, "CMYK" if image.mode == "CMYK" else "RGB") if profile else None
    if to_srgb is None and not image.has_transparency_data and image.mode != "CMYK" and depth != 16:
        return _plain

    def convert(strip: Image.Image) -> Image.Image:
        straight = strip.convert(_STRAIGHT[strip.mode]) if strip.mode in _STRAIGHT else strip
        colours = straight if straight.mode == "CMYK" and to_srgb is not None else straight.convert("RGB")
        if to_srgb is not None:
            colours = to_srgb.apply(colours)
        if not straight.has_transparency_data:
            return colours
        behind = Image.new("RGB", colours.size, BACKGROUND)
        return Image.composite(colours, behind, straight.convert("RGBA").getchannel("A"))

    return convert


def _plain(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _numbers(image: Image.Image) -> Callable[[Image.Image], np.ndarray] | None:
    """What gives the numbers of a grey image that is not of 8 bits without a sign; None of other images."""
    tags = getattr(image, "tag_v2", {})
    signed, bits = tags.get(339, (1,))[0] == 2, tags.get(258, (8,))[0]
    if image.mode == "L" and signed:
        return lambda strip: np.asarray(strip).view(np.int8)
    if image.mode == "I" and tags and not signed and bits == 32:
        return lambda strip: np.asarray(strip).view(np.uint32)
    return np.asarray if image.mode == "F" or image.mode[0] == "I" else None


def _scale(image: Image.Image, numbers: Callable[[Image.Image], np.ndarray], grey: Grey | None) -> Scale:
    """The scale of an image's numbers: ``grey``, which must hold them, or by `bounds`."""
    tops = range(0, image.height, STRIP)
    strips = (image.crop((0, top, image.width, min(top + STRIP, image.height))) for top in tops)
    ends = [(own[np.isfinite(own)], own.dtype) for own in map(numbers, strips)]
    known = np.array([end for own, _ in ends if own.size for end in (own.min(), own.max())], ends[0][1])
    if grey is None or not known.size:
        return bounds(known)
    scale = (grey[0], grey[1]) if len(grey) == 2 else (0, grey[0])
    if len(grey) == 1 and known.dtype.kind in "ui":
        scale = 0, (1 << min(int(grey[0]), 16)) - 1
    least, most = known.min().item(), known.max().item()
    if least < scale[0] or most > scale[1]:
        raise Unfaithful(f"its numbers are {least:g} to {most:g}, where grey pictures are read as {scale_text(scale)}")
    return scale


def _of_numbers(image: Image.Image, numbers: Callable[[Image.Image], np.ndarray], scale: Scale) -> Convert:
    black, white = scale
    key = image.info.get("transparency")
    inverted = getattr(image, "tag_v2", {}).get(262) == 0  # TIFF's WhiteIsZero, which PIL minds in 8 bits alone

    def convert(strip: Image.Image) -> Image.Image:
        own = numbers(strip)
        parts = np.array_split(own, -(-len(own) // STRIP))  # the numbers take eight times the levels' memory
        levels = np.concatenate([levels_between(part, black, white) for part in parts])
        if inverted:
            levels = 255 - levels
        if isinstance(key, int):
            levels[own == key] = 255
        return Image.fromarray(levels).convert("RGB")

    return convert


def _bits_of_colours(image: Image.Image) -> int:
    """Bits of each value of an image that is not loaded and has colours or alpha; 8 where nothing says more.

    PIL gives only the upper 8 of them.
    """
    if image.mode not in ("RGB", "RGBA", "CMYK", "LA"):
        return 8
    if image.format == "TIFF":
        return int(max(getattr(image, "tag_v2", {}).get(258, (8,))))
    if image.format == "JPEG2000" and getattr(image, "fp", None) is not None:
        return _bits_of_jpeg2000(image)
    tiles = getattr(image, "tile", None) or []
    return 16 if image.format == "PNG" and any(";16" in str(tile[3]) for tile in tiles) else 8


def _bits_of_jpeg2000(image: Image.Image) -> int:
    """Of the first component, by the marker that opens the code stream (ISO/IEC 15444-1, A.5.1)."""
    file = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    file.seek(0)
    head = file.read(1 << 16)
    file.seek(place)
    start = head.find(b"\xff\x4f\xff\x51")
    return 8 if start < 0 or start + 42 >= len(head) else (head[start + 42] & 0x7F) + 1


def _check_deep_colours(image: Image.Image) -> None:
    if isinstance(image.info.get("transparency"), tuple):
        raise Unfaithful("its transparent colour has 16 bits; give it an alpha channel, as in: magick IN OUT")
    colours = image.getbands().index("A") if "A" in image.getbands() else len(image.getbands())
    tops = [top for _, top in _extremes(image)[:colours]]
    if image.mode != "CMYK" and max(tops) < _LOW:
        raise Unfaithful("its 16-bit colours use 12 bits or fewer; scale them, as in: magick IN -auto-level OUT")


@lru_cache(8)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """What makes sRGB of ``mode``; None of a profile that is sRGB, that is damaged or that is of another mode."""
    try:
        own, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        made = ImageCms.buildTransform(
            own, srgb, mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    if mode == "CMYK":
        return made
    shown = np.asarray(made.apply(Image.fromarray(_CUBE))).astype(int)
    return None if np.abs(shown - _CUBE).max() <= _SAME else made


def _extremes(image: Image.Image) -> list[tuple[float, float]]:
    """The least and the largest value of each band."""
    if image.mode[0] in "IF":
        own = np.asarray(image)
        own = own[np.isfinite(own)]
        return [(own.min(), own.max())]
    return [band.getextrema() for band in image.split()]  # type: ignore[misc]


def _is_blank(image: Image.Image) -> bool:
    return all(least == most for least, most in _extremes(image))
