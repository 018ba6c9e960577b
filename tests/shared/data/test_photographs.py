"""Photographs of others' packages: options, a split that nothing moves, and stand-ins of the packages' form."""

from __future__ import annotations

import hashlib
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from promptfed.shared import get_extra
from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data.options import STAMPS
from promptfed.shared.data.photographs import GRADES, KINDS, caption_of, squared

VALUES = ("0.0", "0.3333333333333333", "0.6666666666666666", "1.0")


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of elpv-dataset's form with 160 grey cells: each second is mono, each grade as frequent as others."""
    folder = tmp_path / "elpv_dataset" / "data"
    (folder / "images").mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('code of the package is not needed')\n")
    lines = []
    for number in range(160):
        name, kind = f"images/cell{number:04}.png", ("mono", "poly")[number % 2]
        Image.new("L", (30, 30), number).save(folder / name)
        lines.append(f"{name}  {VALUES[number // 2 % 4]:20}{kind}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elpv_dataset", raising=False)
    return folder


def files(source: Source, part: str = "train") -> set[str]:
    split = getattr(source, part)
    return {str(split._name(int(row))) for row in split._rows}


def test_solar_cells_have_two_classes_or_four(cells: Path) -> None:
    source = open_source("solar?domain=mono")
    assert source.class_names == ("functional", "defective")
    assert len(source.train) + len(source.test) == 80
    assert source.domain is not None
    assert "monocrystalline" in source.domain.description
    assert source.train.image(0).mode == "RGB"
    labels = torch.cat([source.train.labels, source.test.labels])
    assert labels.float().mean() == 0.5  # from 0.5 on: two grades of four
    assert open_source("solar:?defect=grades").class_names == GRADES
    for least, defective in (("0.3", 3), ("0.34", 2), ("0.67", 1), ("1", 1)):
        found = open_source(f"solar?defect={least}")
        assert torch.cat([found.train.labels, found.test.labels]).sum() == 40 * defective


def test_a_photograph_stays_on_its_side_whatever_else_is_chosen(cells: Path) -> None:
    whole = open_source("solar")
    tested = files(whole, "test")
    assert 0.1 < len(tested) / 160 < 0.4
    places = [f"cell{number:04}.png" for number in range(160)]
    fourth = {name for name in places if hashlib.sha256(f"0/{name}".encode()).digest()[-1] % 4 == 0}
    assert {Path(path).name for path in tested} == fourth
    assert whole.train.path(0) is not None, "other processes may read it"
    for query in ("domain=mono", "defect=grades", "defect=1", "per_class=20", "domain=poly&per_class=15"):
        part = open_source(f"solar?{query}")
        assert files(part, "test") <= tested
        assert files(part) <= files(whole)
    assert files(open_source("solar?split_seed=1"), "test") != tested
    few = open_source("solar?per_class=20")
    assert [int((torch.cat([few.train.labels, few.test.labels]) == k).sum()) for k in (0, 1)] == [20, 20]
    for name in KINDS:
        assert files(open_source(f"solar?domain={name}")) <= files(whole)


REFUSED = [
    ("solar:here", "takes nothing before"), ("solar?domain=thin", "choose one of mono, poly"),
    ("solar?defect=0", "above 0 and up to 1"), ("solar?defect=1.1", "above 0 and up to 1"),
    ("solar?defect=some", "not a number"), ("solar?per_class=1", "less than 2"),
    ("solar?level=names", "unknown option"),
]  # fmt: skip


@pytest.mark.parametrize(("uri", "complaint"), REFUSED)
def test_what_solar_does_not_know_is_refused(cells: Path, uri: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        open_source(uri)


WRONG = ["images/a.png 0.5 mono", "images/a.png 1.0 thin", "../a.png 1.0 mono", "images/a.png nan mono", "cell 1.0",
    "images/a.png 1.333 mono", "images/a.png 0.28 mono",
]  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_damaged_table_is_named_with_its_line(cells: Path, line: str) -> None:
    table = cells / "labels.csv"
    table.write_text(table.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"labels.csv, line 161 .*install elpv-dataset again"):
        open_source("solar")
    table.unlink()
    with pytest.raises(DataError, match=r"labels.csv cannot be read"):
        open_source("solar")


@pytest.mark.parametrize("found", [None, SimpleNamespace(submodule_search_locations=None)])
def test_a_missing_package_is_one_line_that_says_how_to_install(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr("promptfed.shared.data.photographs.find_spec", lambda name: found)
    says = re.escape(f"solar: needs the package elpv-dataset: {get_extra('photos')}.")
    with pytest.raises(DataError, match=f"^{says}$"):
        open_source("solar")


@pytest.mark.skipif(find_spec("elpv_dataset") is None, reason="promptfed[photos] is not installed")
def test_the_real_cells() -> None:
    mono, poly = open_source("solar?domain=mono"), open_source("solar?domain=poly")
    assert [len(part) for part in (mono.train, mono.test, poly.train, poly.test)] == [826, 248, 1165, 385]
    assert mono.train.image(0).size == (300, 300)


def stamp(root: Path, name: str, caption: str | None, size: tuple[int, int] = (20, 10)) -> None:
    path = root / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGBA", size, (200, 0, 0, 255))
    image.putpixel((0, 0), (random.Random(name).randrange(256), 0, 0, 0))
    image.save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(f"{caption}\nde.utf8=Ein Ding.\n", encoding="utf-8")


@pytest.fixture
def stamps(tmp_path: Path) -> Path:
    for number in range(24):
        stamp(tmp_path, f"animals/mammals/cats/m{number}", "A cat.")
        stamp(tmp_path, f"food/fruit/f{number}", "A pear.")
    stamp(tmp_path, "food/fruit/cartoon/drawn", "A drawn pear.")
    stamp(tmp_path, "food/fruit/f1_mirror", None)
    stamp(tmp_path, "symbols/shapes/circle", "A circle.")
    stamp(tmp_path, "space/sun", "The Sun.")
    stamp(tmp_path, "vehicles/ship/large/s", "A ship.", (10, 20))
    return tmp_path


def test_stamps_are_cut_out_photographs_on_white_squares(stamps: Path) -> None:
    source = open_source(f"stamps?root={stamps}")
    assert source.class_names == ("fruit", "mammal", "vehicle")
    assert len(source.train) + len(source.test) == 49
    names = [source.train._name(int(row)) for row in source.train._rows]
    assert names == sorted(names, key=Path), "whatever the disk's order"
    assert source.train.path(0) is None, "it is not its file as it is"
    tall = squared(stamps / "vehicles/ship/large/s.png")
    assert [tall.getpixel((left, 9)) for left in (4, 5, 14, 15)] == [(255,) * 3, *[(200, 0, 0)] * 2, (255,) * 3]
    assert len(source.test) > 4
    image = source.train.image(0)
    assert (image.size, image.getpixel((0, 0)), image.getpixel((10, 10))) == ((20, 20), (255,) * 3, (200, 0, 0))
    assert image.getpixel((0, 5)) == (255,) * 3  # what is transparent
    assert files(open_source(f"stamps?root={stamps}&per_class=10"), "test") <= files(source, "test")
    by_name = open_source(f"stamps?root={stamps}&level=names&per_class=10")
    assert by_name.class_names == ("Sun", "cat", "pear", "ship")
    assert torch.bincount(torch.cat([by_name.train.labels, by_name.test.labels])).tolist() == [1, 10, 10, 1]


CAPTIONS = {
    "A badger.": "badger", "An Adelaide Rosella.": "Adelaide Rosella", "A pair of cherries.": "cherries",
    "A “Fuji” apple.": "Fuji apple", "A peacock (a male peafowl).": "peacock", "Eat your broccoli!": None,
    "A red and white flower": "red and white flower", "A red and white anemone flower": None,
    "Hibiscus": None, "A .": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("caption", "name"), CAPTIONS.items())
def test_a_caption_s_name(tmp_path: Path, caption: str, name: str | None) -> None:
    stamp(tmp_path, "thing", caption)
    assert caption_of(tmp_path / "thing.png") == name
    assert caption_of(tmp_path / "other.png") is None


def test_missing_stamps_are_one_line_that_says_how_to_install(tmp_path: Path, stamps: Path) -> None:
    for root in (tmp_path / "none", stamps / "symbols"):
        with pytest.raises(DataError, match=r"apt-get install tuxpaint-stamps-default, or give .* by root="):
            open_source(f"stamps?root={root}")
    for uri, complaint in (("stamps:x", "nothing before"), ("stamps?level=all", "kinds, names")):
        with pytest.raises(DataError, match=complaint):
            open_source(f"{uri}{'&' if '?' in uri else '?'}root={stamps}")


@pytest.mark.skipif(not STAMPS.is_dir(), reason="tuxpaint-stamps-default is not installed")
def test_the_real_stamps() -> None:
    kinds, names = open_source("stamps"), open_source("stamps?level=names")
    assert (len(kinds.class_names), len(kinds.train), len(kinds.test)) == (13, 199, 73)
    assert (len(names.class_names), len(names.train), len(names.test)) == (329, 265, 90)
    counts = torch.bincount(kinds.test.labels, minlength=13), torch.bincount(kinds.train.labels, minlength=13)
    assert min(int(counts[0].min()), int(counts[1].min())) >= 2
    assert kinds.test.image(0).width == kinds.test.image(0).height
