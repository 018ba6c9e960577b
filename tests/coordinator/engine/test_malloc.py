"""The C library's heaps: two for all threads, unless its own variable says otherwise; what is free goes back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from promptfed.coordinator.engine import malloc, scheduler
from tests.support.coordinators import in_thread
from tests.support.waiting import PATIENCE

# Threads that hold memory at the same time, as many as there are requests under way; glibc then tells its heaps.
THREADS = """
import ctypes, threading
from promptfed.coordinator.engine.malloc import share_heaps
share_heaps()
together = threading.Barrier(12)
def hold():
    kept = [bytearray(2_000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=hold) for _ in range(12)]
for one in threads: one.start()
for one in threads: one.join()
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="glibc's allocator: run with glibc")
@pytest.mark.parametrize(("variable", "most"), [(None, 2), ("1", 1)])
def test_threads_share_heaps(variable: str | None, most: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"}
    environment |= {} if variable is None else {"MALLOC_ARENA_MAX": variable}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    heaps = sum(line.startswith("Arena ") for line in done.stderr.splitlines())
    assert heaps == most, done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator: run with glibc")
def test_free_memory_between_what_is_in_use_goes_back() -> None:
    """100 MB in pieces, of which each hundredth stays: glibc by itself would keep all that lies before the last."""
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    pieces = [bytearray(2_000) for _ in range(50_000)]
    kept = pieces[::100]
    del pieces
    malloc.give_back()
    assert process.memory_info().rss - before < 20e6
    assert sum(len(piece) for piece in kept) == 1_000_000


@pytest.mark.extended
def test_the_coordinator_gives_it_back_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = threading.Event()
    monkeypatch.setattr(scheduler, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "give_back", given.set)
    with in_thread(tmp_path):
        assert given.wait(PATIENCE)
