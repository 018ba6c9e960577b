"""``wsi:``: tiles over tissue of synthetic pyramids, and slides that are not as they should be."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from promptfed.shared.data import open_source
from promptfed.shared.data.registry import class_names_of
from tests.shared.data.medical.test_dicom import refused

pytest.importorskip("tiffslide", reason="slides: pip install '.[medical]'")
import tifffile
from PIL import Image

from promptfed.shared.data.medical.readers import Request, readers
from promptfed.shared.data.medical.slides import facts, pixels


def pyramid(path: Path, seed: int, height: int = 1024, width: int = 1536) -> np.ndarray:
    """White glass with a black border and a pink rectangle of tissue, at three levels."""
    draws = np.random.default_rng(seed)
    whole = np.full((height, width, 3), 240, dtype=np.uint8)
    whole[:64] = 0
    whole[256:768, 512:1280] = np.array([200, 90, 160]) + draws.integers(-30, 30, (512, 768, 3))
    with tifffile.TiffWriter(path) as file:
        options = {"tile": (128, 128), "photometric": "rgb", "compression": "zlib"}
        file.write(whole, subifds=0, **options)
        for factor in (2, 4):
            file.write(whole[::factor, ::factor], subfiletype=1, **options)
    return whole


def test_tiles_are_those_over_tissue_and_have_the_slides_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    whole = pyramid(path, 1)
    settings = {"level": 0, "tile": 256, "tissue": 0.5}
    places = (facts(path, settings) or {})["frames"]
    assert places == [[x, y] for y in (256, 512) for x in (512, 768, 1024)]
    for x, y in places:
        assert np.array_equal(pixels(path, [x, y], settings), whole[y : y + 256, x : x + 256])


def test_other_levels_and_shares(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    whole = pyramid(path, 1)
    settings = {"level": 1, "tile": 128, "tissue": 0.9}
    places = (facts(path, settings) or {})["frames"]
    assert len(places) == 6
    x, y = places[0]
    assert np.array_equal(pixels(path, [x, y], settings), whole[::2, ::2][y // 2 : y // 2 + 128, x // 2 : x // 2 + 128])
    assert len((facts(path, {"level": 0, "tile": 256, "tissue": 0}) or {})["frames"]) == 24


def test_a_slides_tiles_have_its_label_and_are_one_group(tmp_path: Path) -> None:
    lines = ["path,label,split,PatientID"]
    for number in range(4):
        pyramid(tmp_path / f"{number}.tiff", number)
        lines.append(f"{number}.tiff,{'xy'[number % 2]},{'train' if number < 3 else 'test'},{'aabc'[number]}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    source = open_source(f"wsi:{tmp_path}?tile=256")
    assert (len(source.train), len(source.test)) == (18, 6)
    assert (len(set(source.train.groups)), len(set(source.test.groups))) == (2, 1)
    assert source.train.labels.tolist() == [0] * 6 + [1] * 6 + [0] * 6
    assert len(open_source(f"wsi:{tmp_path}?tile=256&tiles=2").train) == 6
    (tmp_path / "2.tiff").write_bytes((tmp_path / "2.tiff").read_bytes()[:3000])
    assert "the file is damaged" in str(refused(f"wsi:{tmp_path}?tile=256"))
    assert len(open_source(f"wsi:{tmp_path}?tile=256&on_unreadable=skip").train) == 12
    for option in ("tile=3", "tile=100000", "tissue=2", "tiles=0", "level=x"):
        assert option.split("=")[0] in str(refused(f"wsi:{tmp_path}?{option}"))
    assert "it has no level 7" in str(refused(f"wsi:{tmp_path}?level=7"))


def masked(folder: Path, count: int = 2, factor: int = 4) -> None:
    """Slides of which the left half of the tissue is of class 1, the next quarter of class 2, the rest of none."""
    (folder / "masks").mkdir(exist_ok=True)
    lines = ["path,split,PatientID"]
    for number in range(count):
        pyramid(folder / f"{number}.tiff", number)
        mask = np.zeros((1024, 1536), dtype=np.uint8)
        mask[256:768, 512:896] = 1
        mask[256:768, 896:1024] = 2
        Image.fromarray(mask[::factor, ::factor]).save(folder / "masks" / f"{number}.png")
        lines.append(f"{number}.tiff,{'train' if number else 'test'},p{number}")
    (folder / "labels.csv").write_text("\n".join(lines))


def test_a_mask_labels_the_tiles(tmp_path: Path) -> None:
    """Tiles of 256 pixels begin at 512, 768 and 1024: class 1, half of each, none."""
    masked(tmp_path)
    uri = f"wsi:{tmp_path}?tile=256&masks={tmp_path / 'masks'}&mask_classes=tumour,stroma"
    source = open_source(uri)
    assert source.class_names == ("tumour", "stroma")
    assert class_names_of(uri) == source.class_names
    assert source.train.labels.tolist() == [0, 0, 0, 0]
    smaller = open_source(uri.replace("tile=256", "tile=128"))
    columns = [0, 0, 0, 1]  # of the edges 512, 640, 768 and 896
    assert smaller.train.labels.tolist() == columns * 4
    assert open_source(uri + "&mask_share=0.6").train.labels.tolist() == [0, 0]
    assert len(set(source.train.groups)) == 1


def test_a_changed_mask_changes_the_labels(tmp_path: Path) -> None:
    masked(tmp_path)
    uri = f"wsi:{tmp_path}?tile=256&masks={tmp_path / 'masks'}&mask_classes=tumour,stroma"
    before = open_source(uri).train.labels.tolist()
    for path in (tmp_path / "masks").glob("*.png"):
        Image.fromarray(3 - np.maximum(np.asarray(Image.open(path)), 1)).save(path)
    assert open_source(uri).train.labels.tolist() != before


@pytest.mark.parametrize(
    ("picture", "says"),
    [
        (None, "it has no mask of its name"),
        (np.full((256, 384), 3, np.uint8), "has the value 3, for which mask_classes names no class"),
        (np.ones((256, 256), np.uint8), "another shape than the slide"),
        (np.ones((256, 384, 3), np.uint8), "no PNG with one value"),
    ],
)
def test_a_mask_that_cannot_be_used_is_refused(picture: np.ndarray | None, says: str, tmp_path: Path) -> None:
    masked(tmp_path)
    path = tmp_path / "masks" / "1.png"
    path.unlink()
    if picture is not None:
        Image.fromarray(picture).save(path)
    options = f"masks={tmp_path / 'masks'}&mask_classes=tumour,stroma"
    assert says in str(refused(f"wsi:{tmp_path}?tile=256&{options}"))


def test_options_of_masks_are_checked(tmp_path: Path) -> None:
    masked(tmp_path)
    for options, says in (
        ("mask_classes=a", "belongs to masks=FOLDER"),
        (f"masks={tmp_path}/masks", "name the classes"),
        (f"masks={tmp_path}/masks&mask_classes=a,a", "name the classes"),
        (f"masks={tmp_path}/none&mask_classes=a", "no folder with masks"),
        (f"masks={tmp_path}/masks&mask_classes=a&mask_share=0", "mask_share=0"),
    ):
        assert says in str(refused(f"wsi:{tmp_path}?{options}"))


@pytest.mark.parametrize(
    "claims",
    [
        {"TileWidth": 65520, "TileLength": 65520},
        {"TileWidth": 0, "TileLength": 0},
        {"ImageWidth": 4_000_000_000, "ImageLength": 4_000_000_000},
        {"SamplesPerPixel": 60_000},
    ],
)
def test_hostile_slides_end_in_errors(tmp_path: Path, claims: dict[str, int]) -> None:
    path = tmp_path / "a.tiff"
    tissue = np.full((512, 512, 3), (200, 90, 160), dtype=np.uint8)
    tifffile.imwrite(path, tissue, tile=(128, 128), photometric="rgb", compression="zlib")
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name, value in claims.items():
            file.pages[0].tags[name].overwrite(value)
    request = Request("facts", "slides", str(path), 0, {"level": 0, "tile": 128, "tissue": 0.5})
    answer = readers().submit(request).result()
    assert answer.facts is None
    assert re.search("needs more than 3 GB|the file is damaged|has no small level", answer.error or ""), answer.error
