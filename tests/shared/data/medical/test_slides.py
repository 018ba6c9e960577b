"""``wsi:``: tiles over tissue of synthetic pyramids, and slides that are not as they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from promptfed.shared.data import open_source
from tests.shared.data.medical.test_dicom import refused

pytest.importorskip("tiffslide", reason="slides: pip install '.[medical]'")
import tifffile

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
