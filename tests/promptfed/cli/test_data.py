"""`promptfed data`: the list of sources, and sheets of their images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from promptfed.cli.commands.data import SOURCES
from promptfed.cli.main import app
from promptfed.sdk.client import Exit
from promptfed.shared.data import SCHEMES, DataError, open_source
from promptfed.shared.data.registry import SharedSources, class_names_of, tell_look_alikes
from tests.support.own_images import write_folder


def test_every_source_is_listed() -> None:
    done = CliRunner().invoke(app, ["data", "--json"])
    assert done.exit_code == Exit.OK
    assert {one["scheme"] for one in json.loads(done.stdout)} == set(SCHEMES) == set(SOURCES)
    listed = CliRunner().invoke(app, ["data"]).stdout
    for uri, _, where in SOURCES.values():
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


@pytest.mark.parametrize(("arguments", "why"), [
    (["show", "emoji:nowhere", "--out", "x.png"], "unknown style nowhere"),
    (["show", "emoji:flat", "--part", "middle", "--out", "x.png"], "use train or test"),
    (["show", "emoji:flat", "--out", "nowhere/x.png"], "cannot be written"),
    (["show", "emoji:fxemoji?level=names", "--part", "train", "--out", "x.png"], "name another designer"),
])  # fmt: skip
def test_what_cannot_be_shown_is_said(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["data", *arguments], env={"COLUMNS": "400"})
    assert done.exit_code == Exit.BAD_INPUT
    assert why in done.output
    assert not (tmp_path / "x.png").exists()


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
        assert "more" not in listed.stdout
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
