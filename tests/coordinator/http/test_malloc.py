"""The C library's heaps: two for all threads, unless its own variable says otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE

# Threads that hold memory at the same time, as many as there are requests under way; glibc then tells its heaps.
THREADS = """
import ctypes, threading
from promptfed.coordinator.http.malloc import share_heaps
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
