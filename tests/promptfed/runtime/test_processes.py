"""Managed processes: started again at most three times, left alone when done, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from promptfed.runtime.processes import MAX_RESTARTS, Processes, ProcessFailed, interrupt_on_sigterm
from tests.support.waiting import PATIENCE, wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_process_is_started_again_three_times(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", SLEEP])
        for count in range(1, MAX_RESTARTS + 1):
            assert processes.watch() == []
            managed.process.kill()
            managed.process.wait()
            assert processes.watch() == ["client"]
            assert managed.restarts == count
        managed.process.kill()
        managed.process.wait()
        with pytest.raises(ProcessFailed, match="client ended with -9 for the 4th time"):
            processes.watch()


def test_the_reason_stands_in_the_error(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", "raise SystemExit('no such folder')"])
        with pytest.raises(ProcessFailed, match="no such folder"):
            for _ in range(MAX_RESTARTS + 1):
                managed.process.wait()
                processes.watch()


def test_a_process_that_has_done_its_work_is_left_alone(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", "pass"])
        managed.process.wait()
        assert processes.watch() == []
        assert managed.restarts == 0


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with (
        pytest.raises(KeyboardInterrupt),
        Processes(tmp_path, stop_seconds=PATIENCE) as patient,
        Processes(tmp_path, stop_seconds=0.1) as impatient,
    ):
        started = [patient.start("polite", ["-c", SLEEP]), impatient.start("stubborn", ["-c", stubborn])]
        wait_for("start", lambda: all("up" in managed.log.read_text() for managed in started))
        raise KeyboardInterrupt
    assert not any(alive(managed.process.pid) for managed in started)
    assert started[0].process.returncode == -signal.SIGTERM
    assert started[1].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_in_a_start_leaves_nothing_behind(
    sent: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Between the start of a process and the note of it, we are told to end."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started.append(self)
            signal.raise_signal(sent)

    before = signal.getsignal(signal.SIGTERM)
    interrupt_on_sigterm()
    try:
        with pytest.raises(KeyboardInterrupt), Processes(tmp_path) as processes:
            if again:
                processes.start("client", ["-c", "raise SystemExit(1)"]).process.wait()
            monkeypatch.setattr(subprocess, "Popen", Interrupted)
            processes.watch()
            processes.start("other", ["-c", SLEEP])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode is None for process in started] == [False]


def test_a_started_process_hears_signals(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        managed = processes.start("client", ["-c", SLEEP])
        wait_for("its first line", lambda: "up" in managed.tail(1))
        managed.process.terminate()
        assert managed.process.wait() == -signal.SIGTERM
