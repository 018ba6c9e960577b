"""The data folder's lock and mode."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.folder import FolderInUse, FolderLock, _close_to_others, lock_folder
from promptfed.coordinator.store.opening import open_store


def test_one_lock_per_folder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(FolderInUse, match="another coordinator"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_the_lock_is_its_owner_s_and_names_the_process_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[int](), os.close
    folder = tmp_path / "new" / "data"
    for _ in range(2):
        lock = lock_folder(Settings(data_dir=folder))
        assert (folder / "lock").read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
        closed.clear()
        with monkeypatch.context() as watched, pytest.raises(FolderInUse):
            watched.setattr(os, "close", lambda handle: closed.append(handle) or close(handle))
            lock_folder(Settings(data_dir=folder))
        assert closed, "the file of the lock that it did not get"
        lock.release()
        (folder / "lock").write_text("9" * 99)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o644])
def test_the_data_folder_is_for_its_owner_alone_also_where_it_was_there_before(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    open_store(Settings(data_dir=folder)).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    new = tmp_path / "new"
    open_store(Settings(data_dir=new)).close()
    assert stat.S_IMODE(new.stat().st_mode) == 0o700


def test_a_closed_folder_and_another_user_s_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(Path, "chmod", refuse)
    for mode, warned in ((0o700, False), (0o600, False), (0o750, True)):
        os.chmod(tmp_path, mode)
        _close_to_others(tmp_path)
        assert [f"{tmp_path} belongs to another user" in line for line in caplog.messages] == [True] * warned
