"""Icons of themes as class folders: which icon is of which class, and what is drawn; made-up themes, none fetched."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import icon_folders
from promptfed.shared.data import open_source
from promptfed.shared.data.emoji.packages import folder_of
from promptfed.shared.data.emoji.render import RENDERER

BODY = '<path fill="currentColor" d="M4 {y}h16v4H4z"/>'


def theme(*names: str) -> dict[str, object]:
    icons = {name: {"body": BODY.format(y=4 + 2 * place)} for place, name in enumerate(names)}
    return {"icons": icons, "width": 24, "height": 24}


def test_variants_are_of_one_class_and_one_picture_is_none() -> None:
    found = icon_folders.by_class(["bell", "bell-fill", "bell-ring", "bell-ring-outline", "fill", "key", "cat-light"])
    assert found == {"bell": ["bell", "bell-fill"], "bell ring": ["bell-ring", "bell-ring-outline"]}


@pytest.mark.skipif(importlib.util.find_spec(RENDERER) is None, reason="emoji to draw: pip install '.[emoji]'")
def test_folders_hold_what_all_themes_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {
        "one": theme("bell", "bell-fill", "key", "key-bold"),
        "two": theme("bell-outline", "bell", "cat", "cat-thin"),
    }
    monkeypatch.setattr(icon_folders, "THEMES", {name: (f"@icons/{name}", "MIT") for name in drawn})
    monkeypatch.setattr(icon_folders, "fetch", lambda root, wanted: None)
    for name, content in drawn.items():
        folder = folder_of(tmp_path / "packages", f"@icons/{name}")
        folder.mkdir(parents=True)
        (folder / "icons.json").write_text(json.dumps(content))
        (folder / "info.json").write_text(json.dumps({"license": {"spdx": "MIT"}}))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["icon_folders", "--out", str(out), "--packages", str(tmp_path / "packages")])
    icon_folders.main()
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png")) == [
        "one/bell/bell-fill.png",
        "one/bell/bell.png",
        "two/bell/bell-outline.png",
        "two/bell/bell.png",
    ]
    pixels = np.asarray(Image.open(out / "one" / "bell" / "bell.png"))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels.min() < 60, "black on white"
    assert open_source(f"folder:{out}/one?test_on=all").class_names == ("bell",)
