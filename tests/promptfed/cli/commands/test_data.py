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
from promptfed.shared.clip import embedded
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.data import SCHEMES, DataError, open_source
from promptfed.shared.data.registry import SharedSources, class_names_of, tell_look_alikes
from promptfed.shared.service.reasons import Exit
from tests.support.own_images import write_folder
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
    """But in one test: no backbone is loaded."""
    monkeypatch.setattr(embedded, "EMBEDDED", {})


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
    monkeypatch.setattr(embedded, "EMBEDDED", EMBEDDED)
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


def test_every_source_is_listed() -> None:
    done = CliRunner().invoke(app, ["data", "--json"])
    assert done.exit_code == Exit.OK
    assert {one["scheme"] for one in json.loads(done.stdout)} == set(SCHEMES)
    listed = CliRunner().invoke(app, ["data"]).stdout
    for uri, where in ((one.example, one.where) for one in SCHEMES.values()):
        assert uri in listed
        if where == "embedded":
            assert len(open_source(uri).test) > 0


def test_a_sheet_shows_images_of_every_class_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    done = CliRunner().invoke(app, ["data", "show", "emoji:noto", "--out", str(out), "--count", "5"])
    assert done.exit_code == Exit.OK, done.output
    sheet = np.asarray(Image.open(out).convert("RGB")).astype(int)
    test = open_source("emoji:noto").test
    first = [int((test.labels == k).nonzero()[0, 0]) for k in range(5)]
    for at, row in enumerate(first):
        difference = np.abs(sheet[8:72, 8 + 72 * at : 72 + 72 * at] - np.asarray(test.image(row)).astype(int))
        assert difference.mean() < 8  # of the 256 colours that the sheet has few of
        others = [np.asarray(test.image(other)).astype(int) for other in first if other != row]
        assert all(np.abs(sheet[8:72, 8 + 72 * at : 72 + 72 * at] - other).mean() > 12 for other in others)


def test_a_source_is_told_with_its_classes_and_their_counts(tmp_path: Path) -> None:
    write_folder(tmp_path / "own", {"circle": 10, "bar": 5})
    arguments = ["data", "show", f"folder:{tmp_path / 'own'}", "--out", str(tmp_path / "sheet.png")]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(done.stdout)["classes"] == {"bar": {"train": 4, "test": 1}, "circle": {"train": 8, "test": 2}}
    assert (tmp_path / "sheet.png").exists()
    words = CliRunner().invoke(app, arguments).stdout.split()
    assert [word for word in words if word.isdigit()][:6] == ["4", "1", "8", "2", "12", "3"]
    whole = CliRunner().invoke(app, [*arguments, "--json", "--role", "evaluator"])
    assert json.loads(whole.stdout)["classes"]["circle"] == {"train": 0, "test": 10}
    none = CliRunner().invoke(app, [*arguments, "--role", "evaluator", "--part", "train"])
    assert "has no image in train" in none.stderr


def test_every_problem_of_a_folder_is_listed(tmp_path: Path) -> None:
    """A client's error names the first problems; here nothing is left out."""
    own = write_folder(tmp_path / "own", {"circle": 3, "bar": 3})
    wrong = [own / "bar" / f"wrong{number}.png" for number in range(7)]
    for path in wrong:
        path.write_text("no image")
    (own / "bar" / "deeper").mkdir()
    many = [f"empty{number:02}" for number in range(25)]
    for name in many:
        (own / name).mkdir()
    arguments = ["data", "show", f"folder:{own}", "--out", str(tmp_path / "x.png")]
    for listed in (CliRunner().invoke(app, arguments), CliRunner().invoke(app, [*arguments, "--json"])):
        assert listed.exit_code == Exit.BAD_INPUT
        for path in (*wrong, own / "bar" / "deeper", *(own / name for name in many)):
            assert str(path) in listed.stdout
        assert " more" not in listed.stdout
    problems = json.loads(listed.stdout)["problems"]
    assert sum("cannot be read as an image" in problem for problem in problems) == 7
    with pytest.raises(DataError, match=r"And 5 more; `promptfed data show` lists all"):
        open_source(f"folder:{own}")


def test_every_problem_of_a_table_is_listed(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("path,label,split\n,bar,train\na.png,,train\na.png,bar,middle\ngone.png,bar,train\n")
    done = CliRunner().invoke(app, ["data", "show", f"csv:{table}", "--out", str(tmp_path / "x.png"), "--json"])
    problems = json.loads(done.stdout)["problems"]
    for part in ("line 2: path", "line 3: path", "line 4: the split is middle", "gone.png cannot be read as an image"):
        assert any(part in problem for problem in problems), part


def test_class_names_that_look_alike_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where images are not read, and by each command once: it opens its sites' sources together."""
    own = write_folder(tmp_path / "own", {"circle": 3, "bar": 3})
    (own / "Circle").mkdir()
    for k in range(3):
        (own / "circle" / f"{k}.png").rename(own / "Circle" / f"{k}.png")
    write_folder(own, {"circle": 3}, seed=1)
    lines = "".join(f"own/{name}/{k}.png,{name}\n" for name in ("circle", "bar") for k in range(3))
    (tmp_path / "own.csv").write_text(
        "path,label\n" + lines.replace("2.png,bar", "2.png,bar ").replace("1.png,bar", "1.png,bar ")
    )
    uris = {f"folder:{own}": "'Circle' and 'circle'", f"csv:{tmp_path / 'own.csv'}?min_per_class=1": "'bar' and 'bar '"}
    for uri, names in uris.items():
        for read in (open_source, class_names_of, SharedSources().open):
            caplog.clear()
            tell_look_alikes.cache_clear()
            read(uri, "evaluator")
            read(uri, "evaluator")
            assert caplog.messages == [
                f"{uri}: these class names look alike: {names}; rename them, or merge classes that are one"
            ]
    done = CliRunner().invoke(app, ["data", "show", f"folder:{own}", "--out", str(tmp_path / "x.png"), "--json"])
    assert json.loads(done.stdout)["look_alikes"] == [["Circle", "circle"]]
