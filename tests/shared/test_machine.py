"""What differs between systems, and folders of caches: closed to others, no link's, and nothing foreign lost."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from promptfed.coordinator.store.bucket import ObjectCache
from promptfed.shared import __version__, machine
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.clip.caches import features_in
from promptfed.shared.data import DataError, open_source, symbols
from promptfed.shared.data.medical.opening import Keys
from promptfed.shared.service import open_files
from tests.support.windows_like import lock_bytes

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


@pytest.mark.parametrize("mode", [0o777, 0o710, 0o701, 0o500])
def test_an_own_folder_is_closed_again_and_its_owner_may_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(mode)
    assert machine.own_folder(tmp_path / "own").stat().st_mode & 0o777 == 0o700


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


# Locks, limits and signals, on a machine like Windows too


def like_windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes POSIX away; returns what is locked."""
    locked: list[Any] = []

    def locking(handle: int, mode: int, count: int) -> None:
        locked.append(os.lseek(handle, 0, os.SEEK_CUR))
        lock_bytes(handle, mode, count)

    windows: Any = ModuleType("msvcrt")
    windows.locking, windows.LK_NBLCK = locking, 2
    for name, module in (("_fcntl", None), ("_resource", None), ("_msvcrt", windows)):
        monkeypatch.setattr(machine, name, module)
    return locked


@pytest.mark.parametrize("windows", [False, True])
def test_a_lock_is_one_holders_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    locked = like_windows(monkeypatch) if windows else []
    if windows:  # in one process its locks are not held against itself
        whole = SimpleNamespace(lockf=lambda handle, mode, *place: fcntl.flock(handle, mode), LOCK_EX=2, LOCK_NB=4)
        monkeypatch.setattr("tests.support.windows_like.fcntl", whole)
    first, second = (os.open(file, os.O_RDWR) for _ in range(2))
    os.lseek(first, 2, os.SEEK_SET)
    assert machine.try_lock(first)
    assert not machine.try_lock(second)
    assert os.lseek(first, 0, os.SEEK_CUR) == 2
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            os.close(first)

    monkeypatch.setattr(machine.time, "sleep", sleep)
    if not windows:
        os.close(first)
    machine.lock(second)
    assert waits == [machine.RETRY_SECONDS] * 2 * windows
    assert set(locked) <= {machine.LOCKED_BYTE}
    third = os.open(file, os.O_RDWR)
    assert not machine.try_lock(third)
    os.close(second)
    os.close(third)
    handle = machine.open_to_lock(tmp_path)
    assert (tmp_path / ".lock").exists() == windows
    if windows:
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
    os.close(handle)
    machine.sync_folder(tmp_path)
    assert machine._found("no_module_of_this_name") is None
    assert machine._found("json") is not None


def test_the_system_itself_waits_for_a_lock_and_counts_sleep_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    counts = SimpleNamespace(flock=lambda *given: asked.append(given), LOCK_EX=2, LOCK_NB=4)
    monkeypatch.setattr(machine, "_fcntl", counts)
    machine.lock(7)
    assert machine.try_lock(8)
    assert asked == [(7, 2), (8, 2 | 4)]
    for clocks, seconds in ({"CLOCK_BOOTTIME": 5, "clock_gettime": lambda kind: kind}, 5), ({}, 3):
        monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: 3, **clocks))
        assert machine.boot_time() == seconds


def test_folders_modes_and_processors_with_and_without_what_a_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    machine.sync_folder(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(synced[0])
    (file := tmp_path / "file").touch(mode=0o600)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 9} if process == 0 else {1}, raising=False)
    with file.open() as opened:
        machine.set_mode(opened.fileno(), 0o640)
        assert machine.processors() == 3
        for name in ("fchmod", "sched_getaffinity", "geteuid"):
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(machine, "_fcntl", None)
        machine.set_mode(opened.fileno(), 0o600)
    assert file.stat().st_mode & 0o777 == 0o640
    machine.sync_folder(tmp_path)
    machine.expect_own(file)
    assert len(synced) == 1
    for known, told in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda known=known: known)
        assert machine.processors() == told
    monkeypatch.setattr(Path, "exists", lambda path: path == tmp_path)
    for _ in range(2):  # somebody else has made it meanwhile
        machine.make_folder(tmp_path / "a")


class Limits:
    """As of the module `resource`."""

    RLIMIT_NOFILE, RLIMIT_AS, RLIM_INFINITY = 7, 9, -1

    def __init__(self, soft: int, hard: int) -> None:
        self.soft, self.hard, self.set = soft, hard, []

    def getrlimit(self, kind: int) -> tuple[int, int]:
        assert kind == self.RLIMIT_NOFILE
        return self.soft, self.hard

    def setrlimit(self, kind: int, limits: tuple[int, int]) -> None:
        self.set.append((kind, limits))
        raise ValueError("not allowed")


@pytest.mark.parametrize(("soft", "hard", "limits", "asked", "most"), [
    (1000, 5000, (1000, 5000), (5000, 5000), 600), (700, 700, (700, 700), (700, 700), 350),
    (800, 800, (800, 800), (800, 800), 400), (1000, -1, (1000, machine.UNLIMITED), (open_files.ENOUGH_FILES, -1), 600),
    (-1, -1, (machine.UNLIMITED, machine.UNLIMITED), (machine.UNLIMITED, -1), open_files.ENOUGH_FILES),
])  # fmt: skip
def test_open_files_are_raised_to_what_the_system_lets(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limits: Any, asked: Any, most: int
) -> None:
    system = Limits(soft, hard)
    monkeypatch.setattr(machine, "_resource", system)
    assert machine.file_limits() == limits
    open_files.raise_open_files()
    machine.limit_memory(123)
    assert system.set == [(7, asked), (9, (123, 123))]
    assert open_files.most_connections() == most


def test_without_limits_there_are_enough_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    like_windows(monkeypatch)
    open_files.raise_open_files()
    machine.limit_memory(123)
    machine.raise_file_limit(5)
    assert (machine.file_limits(), open_files.open_files()) == (None, open_files.ENOUGH_FILES)
    assert open_files.most_connections() == open_files.ENOUGH_FILES


@pytest.mark.parametrize("windows", [False, True])
def test_signals_and_lines_reach_the_loop(monkeypatch: pytest.MonkeyPatch, windows: bool) -> None:
    async def work() -> tuple[list[int], list[str]]:
        loop, stopped = asyncio.get_running_loop(), []
        if windows:

            def refuse(*given: Any) -> None:
                raise NotImplementedError

            monkeypatch.setattr(type(loop), "add_signal_handler", refuse)
            monkeypatch.setattr(type(loop), "add_reader", refuse)
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            machine.on_signals(loop, stopped.append)
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
                if not windows:
                    loop.remove_signal_handler(number)
                signal.signal(number, handler)
        reading, writing = os.pipe()
        with os.fdopen(reading) as stream:
            os.write(writing, b"one\n")
            lines = [await machine.line_of(stream)]
            os.close(writing)
            lines.append(await machine.line_of(stream))
            assert not loop.remove_reader(stream.fileno()), "nobody reads on"
        return stopped, lines

    assert asyncio.run(work()) == ([signal.SIGTERM, signal.SIGINT], ["one\n", ""])


@pytest.mark.parametrize(("variable", "library", "told"), [
    (None, True, [(-8, 2), 0]), ("4", True, [0]), (None, False, []),
])  # fmt: skip
def test_heaps_are_shared_where_the_library_is_glibc(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, library: bool, told: list[Any]
) -> None:
    asked: list[Any] = []
    glibc = SimpleNamespace(mallopt=lambda *given: asked.append(given), malloc_trim=asked.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: glibc if library else SimpleNamespace())
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if variable is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", variable)
    machine.share_heaps()
    machine.give_back()
    assert asked == told
