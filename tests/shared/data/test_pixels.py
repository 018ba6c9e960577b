"""What an image of each depth and kind becomes, against values written by hand: the table in data-uris.md."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageCms

from promptfed.client_service.serving import prediction
from promptfed.shared.data import DataError, image_files, open_source, pixels, public_sets
from promptfed.shared.data.image_files import image_digest, read_image
from promptfed.shared.data.options import HuggingFaceOptions

GREY = [[0, 60, 200, 255]]


def written(path: Path, values: object, dtype: str, **options: object) -> Path:
    Image.fromarray(np.array(values, dtype=dtype)).save(path, **options)
    return path


def tag(number: int, value: int) -> bytes:
    """An entry of a TIFF with one short."""
    return struct.pack("<HHIH", number, 3, 1, value)


def shown(path: Path) -> list[list[int]]:
    """The grey levels of a file as it is read for training, once they are those that `serve` reads."""
    image = read_image(path)
    assert image.mode == "RGB"
    assert prediction.read_image(path.read_bytes()).tobytes() == image.tobytes()
    pixels = np.asarray(image)
    assert (pixels == pixels[..., :1]).all(), "grey"
    return pixels[..., 0].tolist()


GREYS = [
    *((f"a.{end}", GREY, "u1", GREY) for end in ("png", "tif", "pgm", "bmp", "gif")),
    *((f"a.{end}", [[0, 15420, 51400, 65535]], "u2", GREY) for end in ("png", "tif", "pgm", "jp2")),
    *((f"12in16.{end}", [[0, 963, 3212, 4095]], "u2", GREY) for end in ("png", "tif", "jp2")),
    *((f"14in16.{end}", [[0, 3855, 12851, 16383]], "u2", GREY) for end in ("png", "tif")),
    *((f"8in16.{end}", GREY, "u2", GREY) for end in ("png", "tif")),
    ("20in32.tif", [[0, 246723, 822411, 1048575]], "i4", GREY),
    ("32.tif", [[0, 1010580540, 3368601800, 4294967295]], "u4", GREY),
    ("signed16.tif", [[-1000, -400, 1000, 1550]], "i2", GREY),
    ("signed32.tif", [[-100000, -40000, 100000, 155000]], "i4", GREY),
    ("signed8.tif", [[-128, -68, 72, 127]], "i1", GREY),
    ("shares.tif", [[0, 60 / 255, 200 / 255, 1]], "f4", GREY),
    ("levels.tif", GREY, "f4", GREY),
    ("wide.tif", [[-1, 5, 19, 24.5]], "f4", GREY),
    ("holes.tif", [[np.nan, 60, 200, np.inf]], "f4", GREY),
]


@pytest.mark.parametrize(("name", "values", "dtype", "expected"), GREYS)
def test_grey_of_each_depth(
    tmp_path: Path, name: str, values: list[list[float]], dtype: str, expected: list[list[int]]
) -> None:
    array = np.array(values, dtype=dtype)
    if dtype == "u4":
        Image.fromarray(array.view("i4")).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(tag(339, 2), tag(339, 1)))
    elif dtype in ("i1", "i2"):
        image = Image.fromarray(array.view("u1")) if dtype == "i1" else Image.fromarray(array.view("u2"))
        image.save(tmp_path / name, tiffinfo={339: 2})
    else:
        Image.fromarray(array).save(tmp_path / name)
    assert shown(tmp_path / name) == expected


def test_few_bits_are_spread_over_all_levels(tmp_path: Path) -> None:
    bits = Image.fromarray(np.array([[0, 255]], dtype="u1")).convert("1")
    for end in ("png", "tif", "pbm", "bmp", "gif"):
        bits.save(tmp_path / f"a.{end}")
        assert shown(tmp_path / f"a.{end}") == [[0, 255]]
    (tmp_path / "four.pgm").write_bytes(b"P5 3 1 15\n" + bytes([0, 7, 15]))
    assert shown(tmp_path / "four.pgm") == [[0, 119, 255]]
    (tmp_path / "twelve.pgm").write_bytes(b"P5 3 1 4095\n" + np.array([0, 3212, 4095], dtype=">u2").tobytes())
    assert shown(tmp_path / "twelve.pgm") == [[0, 200, 255]]


def test_white_may_be_zero_in_tiff(tmp_path: Path) -> None:
    for dtype, scale in (("u1", 1), ("u2", 257)):
        path = written(tmp_path / "a.tif", np.array(GREY) * scale, dtype)
        path.write_bytes(path.read_bytes().replace(tag(262, 1), tag(262, 0)))
        assert shown(path) == [[255, 195, 55, 0]]


def colours(path: Path) -> list[tuple[int, ...]]:
    image = read_image(path)
    assert prediction.read_image(path.read_bytes()).tobytes() == image.tobytes()
    return [image.getpixel((x, 0)) for x in range(image.width)]


COLOURS = [
    ("a.png", "RGB", [(200, 100, 50), (0, 0, 9)], [(200, 100, 50), (0, 0, 9)]),
    *(
        (
            f"a.{end}", "RGBA", [(100, 50, 0, 128), (7, 8, 9, 255), (9, 9, 9, 0)],
            [(177, 152, 127), (7, 8, 9), (255,) * 3],
        ) for end in ("png", "tif", "webp", "jp2")
    ),
    *(
        (f"b.{end}", "LA", [(100, 128), (7, 255), (9, 0)], [(177,) * 3, (7,) * 3, (255,) * 3])
        for end in ("png", "tif", "jp2")
    ), ("a.tif", "CMYK", [(0, 255, 255, 0), (0, 0, 0, 155), (255, 0, 0, 0)], [(255, 0, 0), (100,) * 3, (0, 255, 255)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "pixels", "expected"), COLOURS)
def test_colours_and_alpha(
    tmp_path: Path, name: str, mode: str, pixels: list[tuple[int, ...]], expected: list[tuple[int, ...]]
) -> None:
    image = Image.new(mode, (len(pixels), 1))
    image.putdata(pixels)
    image.save(tmp_path / name, **({"lossless": True, "exact": True} if name.endswith("webp") else {}))
    assert colours(tmp_path / name) == expected


def test_lab_colours(tmp_path: Path) -> None:
    Image.new("LAB", (2, 1), (138, 209, 198)).save(tmp_path / "a.tif")  # L* 54.3, a* 80.8, b* 69.9: sRGB's red
    assert np.abs(np.subtract(colours(tmp_path / "a.tif")[0], (255, 0, 0))).max() <= 5


def test_a_palette_and_a_transparent_colour_stand_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 10, 20, 30, 0, 0, 255])
    image.putdata([0, 1, 2])
    for end in ("png", "gif", "tif"):
        image.save(tmp_path / f"a.{end}")
        assert colours(tmp_path / f"a.{end}") == [(255, 0, 0), (10, 20, 30), (0, 0, 255)]
    twice = image.copy()
    twice.putpalette([5, 6, 7] * 3)
    twice.save(tmp_path / "twice.png")
    assert colours(tmp_path / "twice.png") == [(5, 6, 7)] * 3, "a palette may name a colour several times"
    for end in ("png", "gif"):
        image.save(tmp_path / f"b.{end}", transparency=1)
        assert colours(tmp_path / f"b.{end}") == [(255, 0, 0), (255, 255, 255), (0, 0, 255)]
    Image.fromarray(np.array([[0, 60, 200]], dtype="u1")).save(tmp_path / "c.png", transparency=60)
    assert shown(tmp_path / "c.png") == [[0, 255, 200]]
    Image.fromarray(np.array([[0, 15420, 65535]], dtype="u2")).save(tmp_path / "d.png", transparency=15420)
    assert shown(tmp_path / "d.png") == [[0, 255, 255]]


def deep_png(path: Path, values: np.ndarray) -> Path:
    """A PNG of 16-bit colours ``(H, W, 3)``, which PIL does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


def test_deep_colours_keep_their_upper_bits_or_are_refused(tmp_path: Path) -> None:
    path = deep_png(tmp_path / "a.png", np.array([[[200, 100, 50], [0, 9, 255]]]) * 257)
    assert colours(path) == [(200, 100, 50), (0, 9, 255)]
    for values, says in (
        (np.array([[[200, 100, 50], [0, 9, 255]]]) * 16, "its 16-bit colours use 12 bits or fewer"),
        (np.array([[[0x4000, 0x4000, 0x4000], [0x40FF, 0x4000, 0x4000]]]), "all its values would become equal"),
    ):
        with pytest.raises(DataError, match=rf"a\.png .*{says}"):
            read_image(deep_png(path, values))
        with pytest.raises(prediction.BadImage, match=says):
            prediction.read_image(path.read_bytes())


def test_what_was_not_blank_does_not_become_blank(tmp_path: Path) -> None:
    written(tmp_path / "flat.png", [[40000, 40010]], "u2")
    white = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    white.putpixel((0, 0), (255, 255, 255, 0))
    white.save(tmp_path / "white.png")
    black = Image.new("CMYK", (2, 1), (0, 0, 0, 255))
    black.putpixel((0, 0), (255, 0, 0, 255))
    black.save(tmp_path / "black.tif")
    for name in ("flat.png", "white.png", "black.tif"):
        with pytest.raises(DataError, match=rf"{name} .*all its values would become equal"):
            read_image(tmp_path / name)
    assert shown(written(tmp_path / "b.png", [[0, 0]], "u2")) == [[0, 0]]  # it was blank before
    assert shown(written(tmp_path / "c.png", [[7, 7]], "u1")) == [[7, 7]]


def profile(swapped: bool) -> bytes:
    """An sRGB profile, or one whose red is sRGB's green and the other way round."""
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return own.replace(b"rXYZ", b"xXYZ").replace(b"gXYZ", b"rXYZ").replace(b"xXYZ", b"gXYZ") if swapped else own


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp"])
def test_an_embedded_profile_counts(tmp_path: Path, name: str) -> None:
    for mode, alpha in (("RGB", ()), ("RGBA", (255,))):
        image = Image.new(mode, (2, 1), (200, 30, 90, *alpha))
        image.putpixel((0, 0), (1, 2, 3, *alpha))
        for icc, expected in (
            (profile(True), (30, 200, 90)),
            (profile(False), (200, 30, 90)),
            (b"none", (200, 30, 90)),
        ):
            image.save(tmp_path / name, icc_profile=icc, **({"lossless": True} if name.endswith("webp") else {}))
            assert np.abs(np.subtract(colours(tmp_path / name)[1], expected)).max() <= (
                1 if icc == profile(True) else 0
            )


def test_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (2, 1), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.tif", "a.webp"):
        more = {"lossless": True} if name.endswith("webp") else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **more)
        assert colours(tmp_path / name) == [(255, 0, 0)] * 2


# upright


CORNER = Image.fromarray(np.array([[250, 10, 90], [40, 120, 200]], dtype="u1").repeat(8, 0).repeat(8, 1)).convert("RGB")
_UNDO = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # by orientation: the `Image.Transpose` that it undoes


@pytest.mark.parametrize("end", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", _UNDO)
def test_every_orientation_is_read_upright(tmp_path: Path, end: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    options = {"quality": 100, "subsampling": 0} if end == "jpg" else {"lossless": True} if end == "webp" else {}
    path = tmp_path / f"a.{end}"
    CORNER.transpose(Image.Transpose(_UNDO[orientation])).save(path, exif=exif, **options)
    opened = Image.open(path)
    opened.load()
    rows = {"label": [0], 0: {"image": opened}}
    for image in (
        read_image(path),
        prediction.read_image(path.read_bytes()),
        public_sets._dataset_split(rows, "image", "label", ("a", "b"), HuggingFaceOptions(uri="hf:own")).image(0),
        public_sets._torchvision_split("own", [(opened, 0)]).image(0),
    ):
        assert image.size == (24, 16)
        assert np.abs(np.subtract(np.asarray(image), np.asarray(CORNER), dtype=int)).max() <= (3 if end == "jpg" else 0)
        assert end == "jpg" or image_digest(image) == image_digest(CORNER)
        assert image.getexif().get(0x112, 1) == 1


@pytest.mark.parametrize("end", ["jpg", "png", "tif"])
def test_a_huge_image_is_upright_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(image_files, "LARGE", 40_000)
    monkeypatch.setattr(image_files, "SHRUNK", 20_000)
    monkeypatch.setattr(image_files, "LEAST_SIDE", 50)
    exif = Image.Exif()
    exif[0x112] = 6
    CORNER.resize((300, 200), Image.Resampling.NEAREST).transpose(Image.Transpose.ROTATE_90).save(
        tmp_path / f"a.{end}", exif=exif
    )
    small = read_image(tmp_path / f"a.{end}")
    assert small.width < 200 < 2 * small.width
    assert small.width / small.height == pytest.approx(1.5, abs=0.02)
    levels = [small.getpixel((small.width * x // 6, small.height * y // 4))[0] for y in (1, 3) for x in (1, 3, 5)]
    assert np.abs(np.subtract(levels, [250, 10, 90, 40, 120, 200])).max() <= 4


def test_a_huge_deep_image_has_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "LARGE", 40_000)
    monkeypatch.setattr(image_files, "SHRUNK", 20_000)
    monkeypatch.setattr(image_files, "LEAST_SIDE", 50)
    rows = np.repeat(np.arange(600) * 100, 200).reshape(600, 200)
    small = read_image(written(tmp_path / "a.png", rows, "u2"))
    found = np.asarray(small)[:, 0, 0].astype(int)
    assert np.abs(found - np.linspace(0, 59900 / 257, len(found))).max() <= 2


def test_damaged_notes_of_a_sound_image_are_passed_over(tmp_path: Path) -> None:
    CORNER.save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\xff\0\1")
    assert read_image(tmp_path / "a.png").tobytes() == CORNER.tobytes()


def test_a_folder_of_deep_pictures_is_that_of_eight_bits(tmp_path: Path) -> None:
    for name, number in (("disc", 0), ("bar", 1)):
        for kind, scale in (("u1", 1), ("u2", 257)):
            (tmp_path / kind / name).mkdir(parents=True)
            for shift in range(3):
                levels = np.where(np.roll(np.arange(64).reshape(8, 8) % (5 + number) < 2, shift, 1), 200, 60)
                written(tmp_path / kind / name / f"{shift}.png", levels * scale, kind)
    first, second = (open_source(f"folder:{tmp_path / kind}") for kind in ("u1", "u2"))
    assert [first.train.digest(row) for row in range(4)] == [second.train.digest(row) for row in range(4)]


@pytest.mark.parametrize(
    ("before", "depth", "bits"),
    [(0, 7, 8), (9, 0x80 | 15, 16), ((1 << 16) - 43, 11, 12), ((1 << 16) - 42, 11, 8), (None, 11, 8)],
)
def test_the_depth_of_jpeg_2000_stands_in_the_head_of_its_stream(before: int | None, depth: int, bits: int) -> None:
    content = bytes(before or 0) + (b"" if before is None else b"\xff\x4f\xff\x51") + bytes(38) + bytes([depth] * 9)
    file = io.BytesIO(content)
    file.seek(3)
    assert pixels._bits_of_jpeg2000(SimpleNamespace(fp=file)) == bits
    assert file.tell() == 3


DEEP, FLAT, TAG = (None, None, 0, "RGB;16B"), (None, None, 0, "RGB"), 258


@pytest.mark.parametrize(("form", "mode", "about", "bits"), [
    ("TIFF", "L", {"tag_v2": {TAG: (16,)}}, 8), ("TIFF", "RGB", {"tag_v2": {TAG: (8, 16, 8)}}, 16),
    ("TIFF", "CMYK", {"tag_v2": {}}, 8), ("TIFF", "LA", {}, 8),
    ("JPEG2000", "RGB", {"fp": io.BytesIO(b"\xff\x4f\xff\x51" + bytes([11] * 50))}, 12),
    ("JPEG2000", "RGBA", {"fp": None, "tile": [DEEP]}, 8), ("JPEG2000", "RGB", {}, 8),
    ("PNG", "RGB", {"tile": [FLAT, DEEP]}, 16), ("PNG", "RGBA", {"tile": [FLAT]}, 8), ("PNG", "RGB", {"tile": None}, 8),
    ("PPM", "RGB", {"tile": [DEEP]}, 8),
])  # fmt: skip
def test_colours_have_as_many_bits_as_their_file_says(
    form: str, mode: str, about: dict[str, object], bits: int
) -> None:
    assert pixels._bits_of_colours(SimpleNamespace(format=form, mode=mode, **about)) == bits


def test_deep_colours_without_a_faithful_place_are_refused() -> None:
    def deep(mode: str, top: int, **info: object) -> Image.Image:
        image = Image.new(mode, (2, 1), (top, 3, 4, 255 if mode == "RGBA" else 5)[: len(mode)])
        image.info |= info
        return image

    for image in (deep("RGB", 16), deep("RGBA", 16), deep("CMYK", 1)):
        pixels._check_deep_colours(image)
    for image in (deep("RGB", 15), deep("RGBA", 15)):
        with pytest.raises(pixels.Unfaithful, match="its 16-bit colours use 12 bits or fewer"):
            pixels._check_deep_colours(image)
    with pytest.raises(pixels.Unfaithful, match="its transparent colour has 16 bits"):
        pixels._check_deep_colours(deep("RGB", 99, transparency=(1, 2, 3)))


@pytest.mark.parametrize(("values", "dtype", "ends"), [
    ([0, 255], "u2", (0, 255)), ([9, 256], "u2", (0, 511)), ([-1, 5], "i4", (-1, 5)), ([0.5, 1], "f4", (0, 1)),
    ([0, 2], "f4", (0, 255)), ([3, 255], "f4", (0, 255)), ([0, 255.5], "f4", (0, 255.5)), ([3, 256], "f4", (3, 256)),
    ([np.nan, 0.5, np.inf], "f4", (0, 1)),
])  # fmt: skip
def test_black_and_white_follow_from_the_numbers(values: list[float], dtype: str, ends: tuple[float, float]) -> None:
    assert pixels.bounds(np.array([values], dtype)) == ends


def test_equal_numbers_are_black_by_their_own_ends() -> None:
    with np.errstate(all="raise"):
        assert pixels.levels_between(np.array([7.0, 7.0]), 7, 7).tolist() == [0, 0]


@pytest.mark.parametrize("factor", [2, 3])
def test_strips_make_the_whole_picture(monkeypatch: pytest.MonkeyPatch, factor: int) -> None:
    monkeypatch.setattr(pixels, "STRIP", 2)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (15, 7, 3), dtype=np.uint8))
    assert pixels._reduced(image, pixels._plain, factor).tobytes() == image.reduce(factor).tobytes()


def test_a_given_scale_has_at_most_16_bits_and_needs_a_number() -> None:
    whole, none = (Image.fromarray(np.array([own])) for own in (np.array([0, 4000], "u2"), np.full(2, np.nan, "f4")))
    for bits, white in ((12.0, 4095), (16.0, 65535), (20.0, 65535)):
        assert pixels.in_rgb(whole, grey=(bits,)).info == {pixels.GREY: (0, white)}
    with pytest.raises(pixels.Unfaithful, match="none of its pixels is a finite number"):
        pixels.in_rgb(none, grey=(1.0,))


@pytest.mark.parametrize(("values", "blank"), [
    (np.array([[np.nan, 5, np.inf]], "f4"), True), (np.array([[np.nan, 5, 6]], "f4"), False),
    (np.array([[7, 7]], "u2"), True), (np.array([[7, 8]], "i4"), False), (np.array([[[1, 2, 3]] * 2], "u1"), True),
    (np.array([[[1, 2, 3], [1, 2, 4]]], "u1"), False),
])  # fmt: skip
def test_a_picture_is_blank_where_all_that_is_a_number_is_equal(values: np.ndarray, blank: bool) -> None:
    assert pixels._is_blank(Image.fromarray(values)) is blank


@pytest.mark.parametrize(("mode", "apart", "counts"), [
    ("RGB", 0, False), ("RGB", 2, False), ("RGB", -2, False), ("RGB", 3, True), ("RGB", -3, True), ("CMYK", 0, True),
])  # fmt: skip
def test_a_profile_counts_where_its_colours_are_not_srgbs(
    monkeypatch: pytest.MonkeyPatch, mode: str, apart: int, counts: bool
) -> None:
    made = SimpleNamespace(apply=lambda image: np.asarray(image).astype(int) + apart)
    monkeypatch.setattr(pixels.ImageCms, "buildTransform", lambda *given: made)
    assert (pixels._to_srgb.__wrapped__(profile(False), mode) is made) is counts
