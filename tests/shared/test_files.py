"""Files that are written as a whole or not at all, and stand a power cut."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from promptfed.shared.files import NotAFile, open_file, special_files, write_whole
from tests.support.durable import synced_by


@pytest.mark.parametrize("synced", [True, False])
def test_content_is_synced_before_the_name_and_the_folder_after_it(
    synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0")
    path = tmp_path / "f" / "note"
    path.parent.mkdir()
    found = synced_by(monkeypatch, path.parent, lambda: write_whole(path, b"text", mode=0o600, synced=synced))
    renamed = [("rename", "f/note")]
    assert found == ([("sync", "f/.note.0"), *renamed, ("sync", "f")] if synced else renamed)
    assert path.read_bytes() == b"text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    write_whole(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_whole(path, b"after")

    def tidied(source: Path, target: Path) -> None:
        source.unlink()
        raise OSError("tidied by another")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", tidied)
        with pytest.raises(OSError, match="tidied by another"):
            write_whole(path, b"after")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"note": b"before"}


@pytest.mark.parametrize(("mask", "mode", "found"), [(0, None, 0o666), (0o027, None, 0o640), (0o077, 0o664, 0o664)])
def test_a_file_has_the_permissions_that_are_given_else_those_of_the_process(
    mask: int, mode: int | None, found: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "note", b"text", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note").stat().st_mode) == found


def test_what_is_no_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    file, pipe = tmp_path / "in" / "file", tmp_path / "in" / "pipe"
    file.write_bytes(b"text")
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "again").symlink_to("in")
    assert list(special_files(tmp_path)) == [pipe]
    with open_file(file) as opened:
        assert opened.read() == b"text"
    handles, system = list[int](), os.open
    monkeypatch.setattr(os, "open", lambda *given: (handles.append(system(*given)), handles[-1])[1])
    with pytest.raises(NotAFile):
        open_file(pipe)
    assert handles == []
    # A pipe that took the file's place after the look: it is not waited for.
    monkeypatch.setattr(Path, "stat", lambda path, **_: os.stat(file))
    with pytest.raises(NotAFile):
        open_file(pipe)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handles[0])
