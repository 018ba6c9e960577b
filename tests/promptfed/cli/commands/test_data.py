"""`promptfed data show`: a sheet with captions, copies, how grey pictures are read, and who names the pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner, Result

from promptfed.cli.commands import data
from promptfed.cli.main import app
from promptfed.shared.data import open_source
from tests.support.waiting import PATIENCE

NAMES = ("textile of green wool", "textile of red silk", "textile")


def write(root: Path, most: int | None = None) -> str:
    for label, name in enumerate(NAMES):
        (root / name).mkdir(parents=True)
        for k in range(5):
            draws = np.random.default_rng([label, k])
            pixels = draws.integers(0, 256, (20, 20, 3), np.uint8)
            if most is not None:
                pixels = draws.integers(0, most, (20, 20)).astype(np.uint16)
                pixels[0, 0] = most
            Image.fromarray(pixels).save(root / name / f"{k}.png")
    return f"folder:{root}"


def show(uri: str, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["data", "show", uri, "--out", str(out / "s.png"), *more])


@pytest.fixture(autouse=True)
def nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """But in one test, which gives it time: no backbone is loaded."""
    monkeypatch.setattr(data, "NAMING_SECONDS", 0.0)


@pytest.fixture
def captions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    draw = ImageDraw.ImageDraw.multiline_text

    def noted(self: Any, place: Any, text: str, *given: Any, **options: Any) -> None:
        written.append(text)
        draw(self, place, text, *given, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "multiline_text", noted)
    return written


def test_captions_have_whole_names_and_parts_and_no_number(tmp_path: Path, captions: list[str]) -> None:
    uri = write(tmp_path / "d")
    assert show(uri, tmp_path).exit_code == 0
    assert {" ".join(caption.split("\n")) for caption in captions} == {
        f"{n} {p}" for n in NAMES for p in ("train", "test")
    }
    assert len(captions) == 15
    captions.clear()
    assert show(uri, tmp_path, "--count", "6").exit_code == 0
    assert len(set(captions)) == 6, "each class of each part, before a second image of any"
    captions.clear()
    assert show(uri, tmp_path, "--part", "test").exit_code == 0
    assert [caption.split("\n")[-1] for caption in captions] == ["test"] * 3


def test_exact_copies_are_named_and_shown_first(tmp_path: Path, captions: list[str]) -> None:
    uri = write(tmp_path / "d")
    assert "same picture" not in show(uri, tmp_path).output
    first = tmp_path / "d" / NAMES[0] / "0.png"
    copy = tmp_path / "d" / NAMES[2] / "copy.png"
    Image.open(first).save(copy.with_suffix(".tif"))  # other bytes, equal pixels
    shutil.copy(first, copy)
    captions.clear()
    told = show(uri, tmp_path).output.replace("\n", "")
    assert "The same picture: " in told
    assert all(str(path) in told for path in (first, copy, copy.with_suffix(".tif")))
    assert [caption.endswith("\na copy") for caption in captions] == [True] * 3 + [False] * 14
    (group,) = json.loads(show(uri, tmp_path, "--json").stdout)["duplicates"]
    assert sorted(place.split(": ")[1] for place in group) == sorted(map(str, (first, copy, copy.with_suffix(".tif"))))
    assert Image.open(tmp_path / "s.png").convert("RGB").getpixel((6, 6)) == (255, 0, 0)


def test_how_grey_pictures_are_read_is_told(tmp_path: Path) -> None:
    uri = write(tmp_path / "d", 4000)
    assert "Grey pictures of more than 8 bits are read as 12 bits." in show(uri, tmp_path).output
    assert json.loads(show(f"{uri}?grey=13", tmp_path, "--json").stdout)["grey"] == [0, 8191]
    assert json.loads(show(write(tmp_path / "e"), tmp_path, "--json").stdout)["grey"] is None


def test_a_source_that_is_only_tested_on_shows_its_test_images(tmp_path: Path, captions: list[str]) -> None:
    done = show("emoji:fxemoji?level=names", tmp_path)
    assert done.exit_code == 0, done.output
    assert "Training images are not shown: at level=names" in done.stderr
    assert {caption.split("\n")[-1] for caption in captions} == {"test"}
    assert "there is no part 'all': use train or test" in show("digits", tmp_path, "--part", "all").output


def test_it_tells_how_well_each_embedded_backbone_names_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "NAMING_SECONDS", 3 * PATIENCE)
    monkeypatch.setattr(data, "NAMED", 20)
    uri = "emoji:noto?level=names&only=airplane,pizza,spider,backpack,grapes,hot dog"
    named = json.loads(show(uri, tmp_path, "--json").stdout)["zero_shot"]
    assert list(named) == ["promptfed-tiny", "promptfed-emoji", "promptfed-photo"]
    images = open_source(uri).test
    assert {one["of"] for one in named.values()} == {len(images)}
    assert named["promptfed-emoji"]["right"] > 3
    assert named["promptfed-photo"]["right"] > 3
    told = " ".join(show(uri, tmp_path).output.split())
    assert "Named right without training: promptfed-tiny" in told
    assert f"of {len(images)} test images; a guess 16.7 %." in told
    assert json.loads(show("emoji-scenes:flat?count=9&test_count=3", tmp_path, "--json").stdout)["zero_shot"] == {}
    monkeypatch.setattr(data, "NAMING_SECONDS", 0.0)
    assert "Named right" not in show(uri, tmp_path).output
