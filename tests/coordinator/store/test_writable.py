"""Whether the disk has room."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from promptfed.coordinator.store import writable
from promptfed.coordinator.store.writable import Writable
from tests.support.coordinators import InProcess


def test_whether_the_disk_has_room_is_tried_with_bytes(coordinator: InProcess) -> None:
    most, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    probe = Writable(coordinator.registry.database, coordinator.registry.blobs)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, unlimited))
    try:
        with pytest.raises(OSError, match="File too large"):
            probe._write_a_file()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited))
    assert list(coordinator.registry.blobs.incoming.iterdir()) == []
    assert probe.why_not() is None


def test_the_bytes_reach_the_disk_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs: Any = SimpleNamespace(temporary=lambda: tmp_path / "x")
    probe, synced = Writable(Mock(), blobs), list[int]()
    monkeypatch.setattr(writable, "PROBE_BYTES", 10)  # fewer than Python holds back by itself
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    probe._write_a_file()
    assert (synced, list(tmp_path.iterdir())) == ([10], [])
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        probe._write_a_file()
