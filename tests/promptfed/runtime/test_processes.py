"""Managed processes: started again at most three times, left alone when done, never left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from promptfed.runtime.processes import MAX_RESTARTS, Processes, ProcessFailed
from tests.support.waiting import wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


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
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path, stop_seconds=0.5) as processes:
        started = [processes.start("polite", ["-c", SLEEP]), processes.start("stubborn", ["-c", stubborn])]
        wait_for("start", lambda: all("up" in managed.log.read_text() for managed in started))
        raise KeyboardInterrupt
    assert not any(alive(managed.process.pid) for managed in started)
    assert started[0].process.returncode == -signal.SIGTERM
    assert started[1].process.returncode == -signal.SIGKILL
