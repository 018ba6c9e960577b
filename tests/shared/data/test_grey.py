"""Grey pictures of more than 8 bits: all of a source are read by one scale, which its files share or its URI says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared.clip import FeatureCache, image_reading, load_backbone
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data import readers as data_readers
from promptfed.shared.data.options import FolderOptions
from promptfed.shared.data.registry import SharedSources, class_names_of

Numbers = np.ndarray[Any, Any]


def whole(most: int, kind: str = "u2") -> Numbers:
    """Half of the numbers are 100, half 800; one is ``most``."""
    numbers = np.full((32, 32), 100, kind)
    numbers[:16], numbers[0, 0] = 800, most
    return numbers


def fractions(most: float) -> Numbers:
    numbers = np.full((32, 32), 0.2, "f4")
    numbers[:16], numbers[0, 0] = 0.9, most
    return numbers


def write(root: Path, *pictures: Numbers, end: str = "png") -> str:
    """Two class folders, each with ``pictures`` of which no two are alike."""
    for label, name in enumerate("ab"):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number, numbers in enumerate(pictures):
            own = numbers.copy()
            own[31, 2 * number + label] = own[0, 5]
            Image.fromarray(own).save(root / name / f"{number}.{end}")
    return f"folder:{root}"


def levels(uri: str, place: tuple[int, int] = (5, 5)) -> set[int]:
    source = open_source(uri)
    parts = (source.train, source.test)
    return {int(np.asarray(part.image(row))[(*place, 0)]) for part in parts for row in range(len(part))}


def refused(uri: str) -> str:
    with pytest.raises(DataError) as error:
        open_source(uri)
    with pytest.raises(DataError) as shared:
        SharedSources().open(uri)
    assert str(shared.value) == str(error.value)
    return str(error.value)


def test_files_that_come_out_the_same_need_no_word(tmp_path: Path) -> None:
    uri = write(tmp_path, *[whole(most) for most in (2100, 3000, 4000, 4095)])
    assert levels(uri) == levels(f"{uri}?grey=12") == {round(800 / 4095 * 255)}
    assert open_source(uri).grey == (0, 4095)
    assert open_source(write(tmp_path / "8", np.full((32, 32, 3), 7, "u1"), np.full((32, 32), 9, "u1"))).grey is None
    assert open_source(write(tmp_path / "f", fractions(0.95), fractions(1), end="tif")).grey == (0, 1)


def test_files_of_several_scales_are_refused_with_their_counts(tmp_path: Path) -> None:
    uri = write(tmp_path, whole(900), *[whole(4000)] * 2)
    told = refused(uri)
    assert "2 files as 10 bits, 4 as 12 bits" in told
    assert "grey=12" in told
    assert class_names_of(uri) == ("a", "b")
    rows = [f"{name}/{k}.png,{name},{part}\n" for name in "ab" for k, part in enumerate(("test", "train"))]
    table = "path,label,split\n" + "".join(rows)
    (tmp_path / "t.csv").write_text(table)
    assert "2 files as 10 bits, 2 as 12 bits" in refused(f"csv:{tmp_path}/t.csv")
    (tmp_path / "t.csv").write_text(table.replace("label", "labels"))
    assert "2 files as 10 bits, 2 as 12 bits" in refused(f"csv:{tmp_path}/t.csv")
    assert levels(f"csv:{tmp_path}/t.csv?grey=12") == levels(f"{uri}?grey=12") == {round(800 / 4095 * 255)}
    assert levels(f"{uri}?grey=16") == {round(800 / 65535 * 255)}
    assert "2 files as 0 to 1, 2 as 8 bits" in refused(write(tmp_path / "f", fractions(1), fractions(200), end="tif"))
    assert levels(f"folder:{tmp_path / 'f'}?grey=200") == {round(0.9 / 200 * 255)}


def test_numbers_below_0_need_both_ends_unless_all_files_have_them(tmp_path: Path) -> None:
    uri = write(tmp_path, whole(2000, "i4") - 1000, whole(3000, "i4") - 1000, end="tif")
    assert "2 files as -900 to 1000, 2 as -900 to 2000" in refused(uri)
    assert levels(f"{uri}?grey=-1000,3000") == {round(800 / 4000 * 255)}
    assert "where grey pictures are read as 12 bits" in refused(f"{uri}?grey=12")
    assert open_source(write(tmp_path / "same", *[whole(2000, "i4") - 1000] * 2, end="tif")).grey == (-900, 1000)


UNREADABLE = ["0", "-inf,5", "5,inf", "nan,5", "abc", "-3", "nan", "inf", "", "5,5", "9,1", "1,2,3", "1,"]


@pytest.mark.parametrize("value", UNREADABLE)
def test_an_unreadable_option_is_refused(tmp_path: Path, value: str) -> None:
    told = refused(write(tmp_path, whole(4000), whole(4001)) + f"?grey={value}")
    assert f"grey={value} cannot be read; give bits (12)" in told


def test_a_fraction_may_be_below_one() -> None:
    assert FolderOptions.parse("folder:x", "grey=0.5").grey == (0.5,)


def test_an_option_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    uri = write(tmp_path / "12", whole(4000), whole(4001))
    for value in ("17", "12.5", "99999999999"):
        assert "is no number of bits of whole numbers, which is 1 to 16" in refused(f"{uri}?grey={value}")
    assert "its numbers are 100 to 4000, where grey pictures are read as 10 bits" in refused(f"{uri}?grey=10")
    assert open_source(f"{uri}?grey=100,4001").grey == (100, 4001), "its very ends"
    for ends in ("101,4001", "100,4000"):
        assert "its numbers are 100 to 400" in refused(f"{uri}?grey={ends}")
    plain = write(tmp_path / "8", np.full((32, 32), 9, "u1"), np.full((32, 32), 8, "u1"))
    assert "grey= is for grey pictures of more than 8 bits, and there is none" in refused(f"{plain}?grey=12")
    write(tmp_path / "12", whole(4000), whole(4001), fractions(11.5), end="tif")
    assert "have no common scale" in refused(f"{uri}?grey=12")
    assert open_source(f"{uri}?grey=0,4095").grey == (0, 4095)


def test_pictures_of_8_bits_beside_others_stay_as_they_are(tmp_path: Path) -> None:
    uri = write(tmp_path, np.full((32, 32), 77, "u1"), np.full((32, 32, 3), 77, "u1"), whole(4000), whole(4001))
    assert levels(uri) == levels(f"{uri}?grey=12") == {77, 50}


@pytest.mark.parametrize("apart", [False, True])
def test_features_are_of_the_common_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """Read by threads or by other processes: those of the same pictures that 8 bits hold already."""
    monkeypatch.setattr(image_reading, "apart_on", lambda device: apart)
    monkeypatch.setattr(data_readers, "_readers", {})
    deep = [whole(900), whole(4000), whole(4095)]
    shown = [np.floor(numbers / 4095 * 255 + 0.5).astype("u1") for numbers in deep]
    uris = write(tmp_path / "deep", *deep) + "?grey=12", write(tmp_path / "shown", *shown)
    backbone = load_backbone("promptfed-tiny", None)
    features = [
        FeatureCache(tmp_path / f"{number}").features(backbone, open_source(uri, "evaluator").test)
        for number, uri in enumerate(uris)
    ]
    assert torch.equal(*features)
    if apart:
        data_readers.readers().close()


def test_greys_of_a_result_are_used_or_asked_for(tmp_path: Path) -> None:
    uri = write(tmp_path, whole(900), whole(901))
    assert open_source(uri, greys=[(0, 4095)]).grey == (0, 4095)
    assert open_source(uri, greys=[]).grey == (0, 1023)
    two = [(0.0, 4095.0), (0.0, 1023.0)]
    with pytest.raises(DataError, match="read grey pictures as 12 bits or as 10 bits; say which with grey="):
        open_source(uri, greys=two)
    assert open_source(f"{uri}?grey=11", greys=two).grey == (0, 2047)
    plain = write(tmp_path / "8", np.full((32, 32), 9, "u1"), np.full((32, 32), 8, "u1"))
    assert open_source(plain, greys=two).grey is None
