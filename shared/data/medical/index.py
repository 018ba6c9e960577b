"""What is known of the files of a folder, so that a later start takes one listing. It has keyed ids in place of values.

A line of the stored index is ``["f", file, size, time, facts]`` or ``["p", pixels, width, height, digest]``. Failures
are not stored: a package installed meanwhile, or more memory, may mend them.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from promptfed.shared.data.medical.keys import Keys
from promptfed.shared.data.readers import Request, readers
from promptfed.shared.files import write_whole

IDS = ("patient", "study", "series", "sop", "accession")
_STALE = 2  # times as many lines as count, at which the index is written anew


class Facts(NamedTuple):
    """A file's keyed identifiers ("" where it has none), its frames, and its place in its series."""

    patient: str
    study: str
    series: str
    sop: str
    accession: str
    frames: int
    order: float


class Listed(NamedTuple):
    """A file of a folder."""

    path: str  # within the folder
    id: str
    size: int
    time: int


class Shown(NamedTuple):
    """The size of an image in pixels and its `image_digest` in bytes."""

    width: int
    height: int
    digest: bytes


class Item(NamedTuple):
    """One image: a place in a file."""

    file: Listed
    place: int


@dataclass(frozen=True)
class Broken:
    """A file that cannot be read: its id, its path for the owner's eyes, and the reason."""

    file: Listed
    reason: str


class Index:
    """The index of the files under ``root``, kept in ``folder``."""

    def __init__(self, root: Path, folder: Path, keys: Keys, settings: Mapping[str, Any]) -> None:
        self.root, self.keys, self.settings = root, keys, dict(settings)
        self._file = folder / f"{keys.id('root', root.resolve())}.jsonl"
        self._settings = json.dumps(self.settings, sort_keys=True)
        self._facts: dict[str, tuple[int, int, Facts | None]] = {}
        self._shown: dict[str, Shown] = {}
        self._load()

    def listed(self) -> list[Listed]:
        """The ordinary files under the root, by their paths; hidden ones are left out."""
        found = []
        for path, entry in _entries(self.root, ""):
            about, name = entry.stat(), self.keys.id("file", path)
            size, time = about.st_size, about.st_mtime_ns
            known = self._facts.get(name)
            if known is not None and known[:2] == (size, time):
                size, time = known[:2]  # the same numbers in memory once
            found.append(Listed(path, name, size, time))
        return sorted(found)

    def facts(self, files: Sequence[Listed]) -> tuple[list[tuple[Listed, Facts]], list[Broken]]:
        """The images among ``files`` with their facts, and the files whose headers cannot be read."""
        new = [file for file in files if self._facts.get(file.id, ())[:2] != (file.size, file.time)]
        broken = []
        requests = (Request("facts", str(self.root / file.path)) for file in new)
        with self._file.open("a") as lines:
            answers = zip(new, readers().each(requests), strict=True)
            for file, answer in tqdm(answers, "headers", len(new), leave=False, disable=_quiet(new)):
                if answer.error is not None:
                    broken.append(Broken(file, answer.error))
                    continue
                facts = None if answer.facts is None else self._keyed(answer.facts)
                self._facts[file.id] = file.size, file.time, facts
                lines.write(self._line(file.id))
        bad = {one.file.id for one in broken}
        read = ((file, self._facts[file.id][2]) for file in files if file.id not in bad)
        return [(file, facts) for file, facts in read if facts is not None], broken

    def facts_of(self, file: Listed) -> Facts:
        """The facts of a file that `facts` gave."""
        facts = self._facts[file.id][2]
        assert facts is not None
        return facts

    def _keyed(self, facts: Mapping[str, Any]) -> Facts:
        ids = {name: sys.intern(self.value(name, facts.get(name, ""))) for name in IDS}
        return Facts(**ids, frames=facts["frames"], order=facts.get("order", 0.0))

    def value(self, name: str, text: str) -> str:
        """The keyed id of a header's value."""
        return self.keys.id(name, text) if text else ""

    def shown(self, items: Sequence[Item]) -> tuple[list[Shown | None], list[Broken]]:
        """Size and digest of each image, each decoded once; None for images that cannot be decoded."""
        names = ((self._name(item), item) for item in items)  # computed twice, since all of them take memory
        new = list({name: item for name, item in names if name not in self._shown}.items())
        requests = (self.request("check", item.file.path, item.place) for _, item in new)
        broken = []
        with self._file.open("a") as lines:
            answers = zip(new, readers().each(requests), strict=True)
            for (name, item), answer in tqdm(answers, "images", len(new), leave=False, disable=_quiet(new)):
                if answer.error is not None:
                    broken.append(Broken(item.file, answer.error))
                    continue
                self._shown[name] = Shown(answer.size[0], answer.size[1], bytes.fromhex(answer.digest))
                lines.write(json.dumps(["p", name, *answer.size, answer.digest]) + "\n")
        return [self._shown.get(self._name(item)) for item in items], broken

    def release(self) -> None:
        """Forget what is not needed once the images are known: of many files it takes much memory."""
        self._facts.clear()
        self._shown.clear()

    def request(self, do: str, path: str, place: int) -> Request:
        """Have the pixels of an image read."""
        return Request(do, str(self.root / path), place, self.settings)

    def _name(self, item: Item) -> str:
        return self.keys.id("pixels", *item.file[1:], f"[{json.dumps(item.place)}, {self._settings}]")

    def _load(self) -> None:
        count = 0
        if not self._file.exists():
            self._file.touch(mode=0o600)
        with self._file.open() as lines:
            for line in lines:
                count += 1
                self._take(line)
        live = len(self._facts) + len(self._shown)
        if count > _STALE * live + 100:
            write_whole(self._file, "".join(self._stored()).encode(), mode=0o600)
        elif count:
            with self._file.open("a") as again:
                again.write("\n")  # the end of a line that a crash cut off

    def _take(self, line: str) -> None:
        try:
            kind, name, *values = json.loads(line)
            if kind == "p":
                width, height, digest = values
                self._shown[name] = Shown(width, height, bytes.fromhex(digest))
            else:
                size, time, facts = values
                self._facts[name] = size, time, None if facts is None else self._read(name, size, time, facts)
        except (ValueError, TypeError, struct.error):  # an empty line, or one that a crash cut off
            return

    def _line(self, name: str) -> str:
        """The stored line of a file."""
        size, time, facts = self._facts[name]
        own = None
        if facts is not None:
            (bits,) = struct.unpack("<Q", struct.pack("<d", facts.order))
            own = [*facts[:-1], bits ^ self._mask(name, size, time)]
        return json.dumps(["f", name, size, time, own]) + "\n"

    def _read(self, name: str, size: int, time: int, stored: Sequence[Any]) -> Facts:
        *values, masked = stored
        (order,) = struct.unpack("<d", struct.pack("<Q", masked ^ self._mask(name, size, time)))
        return Facts._make([*(sys.intern(value) if type(value) is str else value for value in values), order])

    def _mask(self, name: str, size: int, time: int) -> int:
        """What hides a file's place in its series, which is a number of its header."""
        return int(self.keys.id("order", name, size, time), 16)

    def _stored(self) -> Iterator[str]:
        for name in self._facts:
            yield self._line(name)
        for name, shown in self._shown.items():
            yield json.dumps(["p", name, shown.width, shown.height, shown.digest.hex()]) + "\n"


def _entries(root: Path, under: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(root / under) as entries:
        for entry in entries:
            path = f"{under}/{entry.name}" if under else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(root, path)
            elif entry.is_file():
                yield path, entry


def _quiet(new: Iterable[object]) -> bool | None:
    """No bar where nothing is new; else tqdm shows one on a terminal."""
    return None if new else True
