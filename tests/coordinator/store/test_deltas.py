"""Differences of payloads that the coordinator keeps: of files, on a full disk, and after a payload is removed."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from promptfed.coordinator.store import deltas
from promptfed.coordinator.store.deltas import Deltas


class FewBlobs:
    """Payloads in files, in place of `Blobs`."""

    def __init__(self, folder: Path):
        self.folder, self.made = folder, 0

    def place(self, digest: str) -> Path:
        return self.folder / digest

    def temporary(self) -> Path:
        self.made += 1
        return self.folder / f"temporary-{self.made}"


@pytest.fixture
def blobs(tmp_path: Path) -> FewBlobs:
    numbers = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    for name, factor in (("one", 1), ("two", 1.001), ("three", 1.002)):
        (tmp_path / name).write_bytes((numbers * np.float32(factor)).tobytes())
    (tmp_path / "short").write_bytes(b"short")
    return FewBlobs(tmp_path)


def test_differences_of_removed_payloads_are_removed(blobs: FewBlobs) -> None:
    kept = Deltas(blobs)
    places = [kept.between("one", "two"), kept.between("two", "three")]
    assert all(isinstance(place, Path) and place.exists() for place in places)
    kept.forget(["one"])
    assert [place.exists() for place in places if isinstance(place, Path)] == [False, True]
    assert kept.between("two", "three") == places[1]


def test_payloads_of_other_lengths_have_no_difference_and_leave_no_file(blobs: FewBlobs) -> None:
    assert Deltas(blobs).between("short", "two") is None
    assert not list(blobs.folder.glob("temporary-*"))


def test_a_full_disk_leaves_no_file_and_is_tried_again(blobs: FewBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, difference = Deltas(blobs), deltas.difference

    def full(*given: object) -> object:
        yield b"a part"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(deltas, "difference", full)
    assert kept.between("one", "two") is None
    assert not list(blobs.folder.glob("temporary-*"))
    monkeypatch.setattr(deltas, "difference", difference)
    assert kept.between("one", "two") is not None
