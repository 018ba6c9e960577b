"""Folders of caches: closed to others whatever the umask, no link's and no other user's, and nothing foreign lost."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from promptfed.coordinator.store.bucket import ObjectCache
from promptfed.shared import __version__
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.clip.caches import features_in
from promptfed.shared.data import DataError, open_source, symbols
from promptfed.shared.data.medical.opening import Keys

DRAWN = ("symbols:chalk", "digits")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache under a umask that closes nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    before = os.umask(0)
    yield tmp_path / "home" / "cache" / "promptfed"
    os.umask(before)


def drawn() -> Image.Image:
    """A picture that is drawn and kept."""
    return open_source("symbols:chalk?topic=weather&per_class=2&test_per_class=1").train.image(0)


def kept_features(root: Path | None, usual: Path) -> FeatureCache:
    """The cache of embedded pictures, with two rows."""
    cache = features_in(root, usual, DRAWN)
    source = open_source("symbols:chalk?topic=weather&per_class=2&test_per_class=1")
    cache.features(load_backbone("promptfed-tiny", "embedded"), source.train, indices=[0, 1])
    return cache


def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all that exists belongs to somebody else."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


MAKERS: dict[str, Callable[[Path], object]] = {
    "pictures": lambda place: drawn(),
    "features": lambda place: kept_features(None, place / "usual"),
    "given features": lambda place: kept_features(place / "given" / "features", place),
    "headers": lambda place: Keys(place / "given" / "index", "dicom:scans"),
    "objects": lambda place: ObjectCache(place / "data" / "cache").open(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_cache_makes_is_closed_to_others_whatever_the_umask(home: Path, tmp_path: Path, kind: str) -> None:
    MAKERS[kind](tmp_path)
    made = [path for path in tmp_path.rglob("*") if path != home.parent.parent]
    assert len(made) > 1
    assert {str(path): oct(path.stat().st_mode & 0o077) for path in made if path.stat().st_mode & 0o077} == {}


def test_a_cache_to_which_a_link_leads_is_not_used(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    for link in (home / "symbols", home / "features" / __version__):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(elsewhere)
    drawn()
    assert kept_features(None, tmp_path / "usual")._root == tmp_path / "usual"
    assert not list(elsewhere.iterdir())
    assert elsewhere.stat().st_mode & 0o777 == 0o755, "it is not ours to close"


def test_a_cache_of_another_user_is_not_used(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = drawn().tobytes()
    assert kept_features(None, tmp_path)._root.parent == home / "features"
    (kept,) = (home / "symbols").iterdir()
    false = bytes(len(kept.read_bytes()) - 32)
    kept.write_bytes(hashlib.sha256(false).digest() + false)  # black pictures, as if they had been drawn so
    assert drawn().tobytes() != pixels, "our own are believed"
    others(monkeypatch)
    assert drawn().tobytes() == pixels
    assert features_in(None, tmp_path, DRAWN)._root == tmp_path


def test_features_and_headers_of_another_user_are_refused_by_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    MAKERS["given features"](tmp_path)
    MAKERS["headers"](tmp_path)
    MAKERS["given features"](tmp_path)
    MAKERS["headers"](tmp_path)  # our own are gone on with
    others(monkeypatch)
    for kind, where in (("given features", given / "features"), ("headers", given / "index")):
        with pytest.raises(DataError, match=f"cannot be kept in {where}: .* belongs to another user; remove it"):
            MAKERS[kind](tmp_path)


def test_tidying_a_cache_leaves_what_is_not_its_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbols, "_MOST_KEPT", 1)
    (home / "symbols").mkdir(parents=True)
    letters = [home / "symbols" / name for name in ("letter.txt", "f" * 63, "f" * 64 + ".png")]
    root = tmp_path / "cache"
    weights = [root / "models" / "model.safetensors", root / ("a" * 64) / "model.safetensors"]
    for path in [*letters, *weights]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours")
        os.utime(path, (1, 1))  # the oldest: first to go
    open_source("symbols:chalk?topic=weather&per_class=20&test_per_class=1").train.image(0)
    drawn()
    cache = FeatureCache(root, max_bytes=1)
    source = open_source("symbols:chalk?topic=weather&per_class=2&test_per_class=1")
    backbone = load_backbone("promptfed-tiny", "embedded")
    for row in range(2):
        cache.features(backbone, source.train, indices=[row])
    assert [path.read_bytes() for path in [*letters, *weights]] == [b"not ours"] * 5
    assert len([path for path in (home / "symbols").iterdir() if path not in letters]) == 1, "ours are tidied"
