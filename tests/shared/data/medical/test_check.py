"""`promptfed data check`: planted defects are found, the report opens in a browser, and little can be shared."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser
from typer.testing import CliRunner

pytest.importorskip("imagehash", reason="checks of data: pip install '.[medical]'")
pytest.importorskip("cleanlab", reason="checks of data: pip install '.[medical]'")
from benchmarks.data_check import FORMATS, measure, planted
from promptfed.cli.main import app
from promptfed.shared.data.medical.check import KINDS, suspected_labels, text_box
from tests.support.browser import browser as browser
from tests.support.own_images import write_folder


@pytest.mark.parametrize("kind", FORMATS)
def test_planted_defects_are_found_and_hardly_anything_else(tmp_path: Path, kind: str) -> None:
    measured = measure(kind, tmp_path)
    assert list(measured) == list(KINDS)
    for name, (right, found, all_of) in measured.items():
        assert all_of > 0, name
        assert right / all_of >= 0.8, name
        assert right / found >= (0.7 if name == "label error" else 0.9), name


def test_flipped_labels_of_separable_features_are_found() -> None:
    draws = np.random.default_rng(3)
    labels = np.repeat(np.arange(3), 40)
    features = np.eye(3)[labels] * 6 + draws.normal(size=(120, 3))
    flipped = draws.choice(120, 10, replace=False)
    given = labels.copy()
    given[flipped] = (given[flipped] + 1) % 3
    found = suspected_labels(given, features, None)
    assert len(set(found) & set(flipped)) >= 9
    assert len(found) <= 12
    assert suspected_labels(labels, features, None) == []


def test_a_line_of_letters_is_boxed_and_noise_is_not() -> None:
    noise = np.random.default_rng(1).integers(20, 235, (128, 128)).astype(np.uint8)
    assert text_box(noise) is None
    image = Image.fromarray(noise)
    ImageDraw.Draw(image).text((10, 50), "DOE JOHN", fill=255, font=ImageFont.load_default(22))
    left, top, right, bottom = text_box(np.asarray(image)) or (0, 0, 0, 0)
    assert 8 <= left <= 14
    assert 48 <= top < bottom <= 80
    assert 80 <= right <= 127


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = write_folder(tmp_path / "own<i>", each=6)
    first = next(root.rglob("*.png"))
    (first.parent / "<b>copy.png").write_bytes(first.read_bytes())
    (first.parent / "broken.png").write_bytes(b"no picture")
    return root


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", "check", *arguments])
    return result.exit_code, result.output


def test_the_command_names_files_and_writes_a_report_for_the_owner(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    code, told = run(f"folder:{folder}", "--out", str(out), "--json")
    assert code == 0
    answer = json.loads(told.strip().splitlines()[-1]) if not told.lstrip().startswith("{") else json.loads(told)
    assert answer["counts"]["duplicate"] == 2
    assert "broken.png" in answer["unreadable"][0]
    assert any(path.endswith("copy.png") for one in answer["findings"] for path in one["files"])
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    page = out.read_text()
    assert "&lt;b&gt;copy.png" in page
    assert "<b>copy" not in page


def test_shared_counts_are_shown_first_and_none_is_under_the_floor(folder: Path, tmp_path: Path) -> None:
    share = tmp_path / "counts.json"
    out = ("--out", str(tmp_path / "report.html"))
    code, told = run(f"folder:{folder}", *out, "--share", str(share))
    assert code != 0
    assert not share.exists()
    assert f"These counts would go to {share}, and nothing else" in " ".join(told.split())
    code, told = run(f"folder:{folder}", *out, "--share", str(share), "--yes")
    assert code == 0
    told = json.loads(share.read_text())
    counts = told["counts"]
    assert set(counts) == {"images", *KINDS}
    assert told["floor"] == 10
    assert counts["images"] == 20  # of 25: nobody learns how many more a later check has
    assert counts["duplicate"] == counts["text"] == 0
    assert all(count % 10 == 0 for count in counts.values())
    assert str(folder.name) not in share.read_text()


def test_the_report_opens_in_a_browser(folder: Path, tmp_path: Path, browser: Browser) -> None:
    out = tmp_path / "report.html"
    assert run(f"folder:{folder}", "--out", str(out))[0] == 0
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.goto(out.as_uri())
    assert page.title() == "Check of images"
    shown = page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(shown) >= 2
    assert all(width > 0 for width in shown)
    assert problems == []


def test_each_kind_is_planted() -> None:
    kinds = set().union(*(one.kinds for one in planted(np.random.default_rng(0))))
    assert kinds | {"unreadable"} == set(KINDS)
