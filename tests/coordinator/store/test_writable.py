"""Whether the disk has room."""

from __future__ import annotations

import resource

import pytest

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
