"""Which files of a folder are classified, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from promptfed.cli.predicting import _files, _read
from promptfed.library.result import _bytes
from promptfed.shared.errors import BadInput


def test_all_files_that_are_not_hidden_are_found(tmp_path: Path) -> None:
    for name in ("b.png", "a/c.png", "a/.hidden.png", ".trash/d.png", "a/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in _files(tmp_path)] == ["a/c.png", "a/e.txt", "b.png"]


def test_a_folder_that_cannot_be_listed_is_no_folder_without_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, closed = os.scandir, tmp_path / "open" / "closed"
    closed.mkdir(parents=True)

    def scandir(place: Any) -> Any:
        if Path(place) == closed:
            raise PermissionError(13, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadInput, match=r"open/closed cannot be listed \(.*\); make it readable"):
        _files(tmp_path)
    with pytest.raises(BadInput, match="none cannot be listed"):
        _files(tmp_path / "none")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    for read in (_read, _bytes):  # of the command, and of a result in Python
        with pytest.raises(BadInput, match=r"cannot read .*a\.png"):
            read(tmp_path / "a.png")
