"""What a killed command leaves on its data folder: its coordinator is ended, and nothing else."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from promptfed.experiments.cluster import orphan
from promptfed.experiments.cluster.orphan import end_orphan
from promptfed.sdk.errors import CommandError
from tests.support.waiting import PATIENCE

HOLDS = """
import signal, sys
from pathlib import Path
from promptfed.coordinator.store.folder_lock import FolderLock
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
signal.pause()
"""


@contextmanager
def holding(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder's lock, with ``words`` in its command line."""
    command = [sys.executable, "-c", HOLDS, str(folder), *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "held\n"
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("words", [(), ("deaf",)])
def test_a_coordinator_on_the_folder_is_ended(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orphan, "END_SECONDS", 0.5 if words else PATIENCE)
    with holding(tmp_path, "promptfed.coordinator", f"--data-dir={tmp_path}", *words) as running:
        assert end_orphan(tmp_path)
        assert running.wait(PATIENCE) != 0
        assert str(running.pid) in capsys.readouterr().err
    assert not end_orphan(tmp_path), "the lock is free"


@pytest.mark.parametrize("words", [("promptfed.coordinator", "--data-dir=/elsewhere"), ("editor", "--data-dir={}")])
def test_a_process_with_another_command_line_is_left_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    with holding(tmp_path, *(word.format(tmp_path) for word in words)) as running:
        assert not end_orphan(tmp_path)
        assert running.poll() is None


def test_a_number_that_another_process_got_is_nobody_s(tmp_path: Path) -> None:
    """The lock is free: whoever has written its number into the file has ended."""
    with holding(tmp_path, "promptfed.coordinator", f"--data-dir={tmp_path}") as running:
        (other := tmp_path / "other").mkdir()
        (other / "lock").write_text(f"{running.pid}\n")
        assert not end_orphan(other)
        assert running.poll() is None
    assert not end_orphan(tmp_path / "new")


def test_one_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphan, "END_SECONDS", 0.05)
    monkeypatch.setattr(orphan, "_serves", lambda pid, folder: True)
    monkeypatch.setattr(orphan.os, "kill", lambda pid, number: None)
    with (tmp_path / "lock").open("w+") as lock:
        lock.write("123\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="end process 123"):
            end_orphan(tmp_path)
