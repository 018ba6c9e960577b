"""What a file is by its first bytes, and how far a large picture is shrunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from promptfed.shared.data import DataError, image_files

DICOM = b"\x00" * 128 + b"DICM"


@pytest.mark.parametrize(("name", "head", "kind"), [
    ("a.svg", b"<?xml version='1.0'?>", "SVG"), ("a.svgz", b"\x1f\x8b\x08", "SVG"),
    ("a.svg", b"<!DOCTYPE svg>", "SVG"), ("a.txt", b"<?xml version='1.0'?>", None),
    ("a.txt", b"<?xml?><svg xmlns=", "SVG"), ("a.svg", b"nothing of the kind", None),
    ("a", b"\0\0\0\x1cftypavif", "AVIF"), ("a", b"\0\0\0\x1cftypavis", "AVIF"), ("a", b"\0\0\0\x1cftypheic", "HEIC"),
    ("a", b"\0\0\0\x1cftypmif1", "HEIC"), ("a.heic", b"\0\0\0\x1cftypmp42", None), ("a", DICOM, "DICOM"),
    ("a", DICOM[1:], None), ("a", b"%PDF-1.7", "PDF"), ("a", b" %PDF-1.7", None), ("a", b"8BPS", "PSD"),
    ("a", b"\x00\x00\x01\x00", "ICO"), ("a.NEF", b"II*\x00", "a camera's raw format"), ("a.tif", b"II*\x00", None),
])  # fmt: skip
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, name: str, head: bytes, kind: str | None) -> None:
    (tmp_path / name).write_bytes(head)
    assert image_files._kind(tmp_path / name) == kind


def test_what_cannot_be_opened_is_of_no_kind(tmp_path: Path) -> None:
    assert image_files._kind(tmp_path / "none.svg") is None


@pytest.mark.parametrize(
    ("size", "size_after"),
    [
        ((100, 100), (100, 100)),
        ((101, 100), (51, 50)),
        ((200, 200), (100, 100)),
        ((300, 300), (100, 100)),
        ((4000, 59), (4000, 59)),  # its shorter side would get too short
        ((4000, 60), (2000, 30)),
    ],
)
def test_a_large_picture_is_shrunk_by_a_whole_number(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], size_after: tuple[int, int]
) -> None:
    monkeypatch.setattr(image_files, "SHRUNK", 10_000)
    monkeypatch.setattr(image_files, "LEAST_SIDE", 30)
    assert image_files.shrunk(Image.new("RGB", size)).size == size_after


@pytest.mark.parametrize(("size", "size_after"), [((10, 10), (10, 10)), ((101, 1), (101, 1)), ((20, 6), (7, 2))])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_picture_of_more_pixels_is_read_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, size: tuple[int, int], size_after: tuple[int, int]
) -> None:
    for name, value in (("LARGE", 100), ("SHRUNK", 20), ("LEAST_SIDE", 2)):
        monkeypatch.setattr(image_files, name, value)
    Image.new("RGB", size).save(tmp_path / f"a.{suffix}")
    by_jpeg = {(20, 6): (10, 3)} if suffix == "jpg" else {}  # a decoder of JPEG makes a half, a quarter, an eighth
    assert image_files.read_image(tmp_path / f"a.{suffix}").size == by_jpeg.get(size, size_after)


@pytest.mark.parametrize(("size", "box"), [
    ((200, 2), None), ((2, 200), None), ((203, 2), (1, 0, 201, 2)), ((2, 205), (0, 2, 2, 202)), ((300, 299), None),
])  # fmt: skip
def test_a_line_keeps_its_middle(size: tuple[int, int], box: tuple[int, int, int, int] | None) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    image = Image.fromarray(drawn)
    assert image_files.middle(image).tobytes() == (image if box is None else image.crop(box)).tobytes()


@pytest.mark.parametrize(
    ("mode", "says"), [("warn", ""), ("bomb", "it has too many pixels; make it smaller, as in: magick a.png")]
)
def test_a_picture_of_too_many_pixels_has_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, says: str
) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100 if mode == "warn" else 99)
    if says:
        with pytest.raises(DataError, match=says):
            image_files.read_image(tmp_path / "a.png")
    else:
        assert image_files.read_image(tmp_path / "a.png").size == (20, 10)


@pytest.mark.parametrize(("size", "scaled"), [
    ((10, 20), [(5, 10)]), ((10, 10), [(5, 5)]), ((11, 10), [(5, 5)]), ((12, 10), [(6, 10), (5, 5)]),
    ((40, 10), [(20, 10), (5, 5)]), ((42, 10), [(21, 5)]),
])  # fmt: skip
def test_columns_outside_of_the_middle_are_left_out_but_of_a_line(
    size: tuple[int, int], scaled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a middle of five times five pixels."""
    asked: list[tuple[int, int]] = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda image, to, *how: asked.append(to) or resize(image, to, *how))
    assert image_files.Cut(5, (5, 5), Image.Resampling.BICUBIC).pixels(Image.new("RGB", size)).shape == (3, 5, 5)
    assert asked == scaled


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize(("height", "width"), [(5, 3), (3, 5)])
def test_a_cut_is_the_middle_of_the_scaled_picture(mode: str, height: int, width: int) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (10, 13, 4), dtype=np.uint8)
    image, bicubic = Image.fromarray(drawn, "RGBA").convert(mode), Image.Resampling.BICUBIC
    left, top = (9 - width) // 2, (7 - height) // 2
    wanted = image.resize((9, 7), bicubic).crop((left, top, left + width, top + height)).convert("RGB")
    found = image_files.Cut(7, (height, width), bicubic).pixels(image)
    assert np.array_equal(found, np.asarray(wanted).transpose(2, 0, 1))
