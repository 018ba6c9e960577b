"""Blobs: bytes stored under their SHA-256, either complete or absent.

Small ones are rows, large ones files or objects. Tensors of large ones are never in memory as a whole.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from promptfed.coordinator.store.blob_rows import BlobRows
from promptfed.coordinator.store.bucket import Bucket, NoObject, ObjectCache, ObjectStoreAway, fresh_key, write_hashed
from promptfed.shared.machine import sync_folder
from promptfed.shared.recent import Recent
from promptfed.shared.service.fault_points import point
from promptfed.shared.tensors import Arrays, decode, decode_file

SMALL_BYTES = 256 << 10  # up to here a blob is a row: as files, most of the time would go into making them durable
REMEMBERED_BYTES = 8 << 20
ADMITTED_BYTES = 32 << 20

Admitted = tuple[Arrays, float]
"""Of a small update from its admission to its aggregation: its tensors, and the norm of its change."""

log = logging.getLogger("promptfed.coordinator")
PREFIX = "sha256:"
LITTER_SECONDS = 3600.0
UNREADABLE = (errno.ENOENT, errno.EIO)


class DamagedBlob(Exception):
    """The bytes under ``digest`` are missing or have changed; ``why`` says which."""

    def __init__(self, digest: str, why: str):
        super().__init__(f"{digest} {why}")
        self.digest = digest
        self.why = why


def digest_of(content: bytes) -> str:
    """``sha256:<hex>`` of ``content``."""
    return PREFIX + hashlib.sha256(content).hexdigest()


def digest_of_file(path: Path) -> str | None:
    """The digest of a file; None where it is missing or cannot be read."""
    try:
        with path.open("rb") as file:
            return PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return None


class Blobs:
    """The blobs of a folder, its database and a bucket. They are written within ``hold``.

    Files in ``hold`` are not removed before the rows that refer to them are committed.

    rows: small blobs; without it all blobs are files. bucket: large blobs; no files are written then. copies: whether
    cached copies of objects are used.
    """

    def __init__(
        self, folder: Path, rows: BlobRows | None = None, bucket: Bucket | None = None, *, copies: bool = True
    ):
        self._folder = folder / "blobs"
        self.bucket = bucket
        self._copies = copies
        self._cache = ObjectCache(folder / "cache")
        self.incoming = folder / "incoming"
        self._temporary = f"{self.incoming}{os.sep}{os.getpid()}-"
        self._numbers = count()
        self._rows = rows
        self._remembered = Recent[bytes](REMEMBERED_BYTES)  # most clients of a phase get the same payload
        self.admitted = Recent[Admitted](ADMITTED_BYTES)
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._unsynced: set[str] = set()  # there by name, but not yet for sure after a power cut
        self._verified: dict[str, tuple[int, ...]] = {}  # what `_version` was when a file had its digest

    def open(self) -> None:
        """Create the folders, and remove the remains of interrupted uploads."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self.incoming.iterdir():
            leftover.unlink()
        if self.bucket is not None:
            self._cache.open()
        sync_folder(self._folder.parent)

    def temporary(self) -> Path:
        """A new path for incoming bytes."""
        return Path(self._temporary + str(next(self._numbers)))  # of this process, whose folder nobody else writes into

    def is_small(self, size: int) -> bool:
        """Whether a blob of ``size`` bytes is stored as a row."""
        return self._rows is not None and size <= SMALL_BYTES

    def read(self, digest: str) -> bytes:
        """The bytes. Raises DamagedBlob."""
        place = self.place(digest)
        return place if isinstance(place, bytes) else place.read_bytes()

    def tensors(self, digest: str) -> tuple[Arrays, object | None]:
        """The tensors and metadata of a blob; a file's are mapped, not read. Raises as ``read`` does, TensorError."""
        place = self.place(digest)
        return decode(place) if isinstance(place, bytes) else decode_file(place)

    def place(self, digest: str) -> bytes | Path:
        """The bytes of a row, or where the file lies. Raises DamagedBlob."""
        return self.remembered(digest) or self.places([digest])[0]

    def remembered(self, digest: str) -> bytes | None:
        """The bytes, if they are in memory; nothing is read."""
        return self._remembered.get(digest)

    def remember(self, held: Held, digest: str) -> None:
        """Keep a small blob of ``held`` in memory, where many are about to read it."""
        if digest in held.small:
            self._remembered.add(digest, held.small[digest], len(held.small[digest]))

    def places(self, digests: list[str]) -> list[bytes | Path]:
        """The bytes or the path of each of several blobs. Raises DamagedBlob for the first damaged one."""
        files = {digest: path for digest in digests if (path := self.path(digest)).exists()}
        whole = {digest for digest in files if self._is_whole(digest)}
        # A damaged file may have been mended by a row.
        missing = [digest for digest in digests if digest not in whole]
        rows = self._rows.read(missing) if self._rows is not None and missing else {}
        objects = self._objects([digest for digest in missing if digest not in rows])
        for digest in missing:
            if digest not in objects:
                _expect(digest, files.get(digest), rows.get(digest))
        if len(digests) == 1 and rows:
            self._remembered.add(digests[0], rows[digests[0]], len(rows[digests[0]]))
        places: dict[str, bytes | Path] = {**rows, **objects, **{digest: files[digest] for digest in whole}}
        return [places[digest] for digest in digests]

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """A block in which ``remove`` keeps the blobs that are put."""
        held = Held(self)
        try:
            yield held
        finally:
            with self._lock:
                for digest in held.digests:
                    self._held[digest] -= 1
                    if self._held[digest] <= 0:
                        del self._held[digest]

    def remove(self, digests: Iterable[str]) -> list[str]:
        """Remove blobs that no row refers to, except held files; returns the removed digests.

        No other transaction may run, since it could refer to a digest again.
        """
        gone = []
        for digest in digests:
            with self._lock:
                if self._held[digest] > 0:
                    continue
                self.path(digest).unlink(missing_ok=True)
                self._verified.pop(digest, None)
                gone.append(digest)
        if self._rows is not None and gone:
            keys = self._rows.remove(gone)
            if self.bucket is not None:
                # Their rows are gone: a crash before this, or a store that is away, leaves litter for the next start.
                self._cache.forget(map(_name, gone))
                self.bucket.remove(keys)
        self._remembered.forget(gone)
        self.admitted.forget(gone)
        return gone

    def remove_superseded(self, keys: Iterable[str]) -> None:
        """Remove objects that were replaced by newer ones. The next start removes what fails now."""
        if self.bucket is not None:
            try:
                self.bucket.remove(keys)
            except ObjectStoreAway as error:
                log.warning("%s", error)

    def remove_litter(self) -> int:
        """Remove objects without a row, which crashes have left; returns how many. For the start.

        Recent objects are kept: they may be about to get their row.
        """
        if self.bucket is None or self._rows is None:
            return 0
        until = time.time() - LITTER_SECONDS  # long enough for a store whose clock differs
        old = [key for key, put in self.bucket.blobs() if put < until]
        litter = set(old) - self._rows.all_keys()
        self.bucket.remove(litter)
        return len(litter)

    def all(self) -> list[str]:
        """Digests of all blobs, whether or not a row refers to them."""
        return sorted({*self.files(), *(self._rows.all() if self._rows is not None else ())})

    def files(self) -> list[str]:
        """Digests of the blobs that are files."""
        return [PREFIX + path.name for path in self._folder.glob("??/*")]

    def path(self, digest: str) -> Path:
        """The path of the blob with ``digest`` if it is a file."""
        name = digest.removeprefix(PREFIX)
        return self._folder / name[:2] / name

    def _note(self, digest: str) -> None:
        with self._lock:
            self._held[digest] += 1

    def _has(self, digest: str) -> bool:
        """Whether the blob is there as a file, whole and durably."""
        if not self._is_whole(digest):
            return False
        if digest in self._unsynced:
            self._sync(digest, new_folder=True)
        return True

    def _is_whole(self, digest: str) -> bool:
        """Whether the file has its digest. It is read again only if it was written to since this was last seen."""
        version = _version(self.path(digest))
        if version is None or self._verified.get(digest) != version:
            self._verified.pop(digest, None)
            if version is None or digest_of_file(self.path(digest)) != digest:
                return False
            self._verified[digest] = version
        return True

    def _objects(self, digests: list[str]) -> dict[str, Path]:
        """Paths of copies of the blobs that are objects. Raises DamagedBlob, ObjectStoreAway."""
        if self._rows is None or self.bucket is None or not digests:
            return {}
        return {digest: self._copy(digest, key) for digest, key in self._rows.keys(digests).items()}

    def _copy(self, digest: str, key: str) -> Path:
        copy = self._cache.path(_name(digest))
        if self._copies and digest_of_file(copy) == digest:
            self._cache.touch(copy.name)
            return copy
        temporary = self.temporary()
        try:
            actual = self._fetch(key, temporary)
            if actual != digest and (newer := self._key_now(digest)) not in (key, None):
                # It was put again meanwhile, and the earlier object removed.
                actual = self._fetch(str(newer), temporary)
            if actual is None:
                raise DamagedBlob(digest, "is missing")
            if actual != digest:
                raise DamagedBlob(digest, f"has changed: its digest is {actual} now")
            return self._cache.adopt(temporary, copy.name)
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, key: str, path: Path) -> str | None:
        """Download an object to a file; returns its digest, or None if there is no object."""
        assert self.bucket is not None
        try:
            return PREFIX + write_hashed(self.bucket.parts(key), path)
        except NoObject:
            return None

    def _key_now(self, digest: str) -> str | None:
        assert self._rows is not None
        return self._rows.keys([digest]).get(digest)

    def _put(self, temporary: Path, digest: str) -> str:
        """Upload a file as an object, and cache it; returns its key."""
        assert self.bucket is not None
        point("blob-written")
        key = fresh_key(digest)
        self.bucket.put(key, temporary)
        self._cache.adopt(temporary, _name(digest))
        point("blob-renamed")
        return key

    def _keep(self, temporary: Path, digest: str) -> None:
        path = self.path(digest)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        point("blob-written")
        new_folder = not path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        self._unsynced.add(digest)
        temporary.rename(path)
        self._sync(digest, new_folder)
        if version := _version(path):
            self._verified[digest] = version
        point("blob-renamed")

    def _sync(self, digest: str, new_folder: bool) -> None:
        folder = self.path(digest).parent
        if new_folder:
            sync_folder(folder.parent)
        sync_folder(folder)
        self._unsynced.discard(digest)


class Held:
    """The blobs that one block writes.

    Small ones (``small``) and the ``keys`` of objects wait for the transaction that names them.
    """

    def __init__(self, blobs: Blobs):
        self._blobs = blobs
        self.digests: list[str] = []
        self.small: dict[str, bytes] = {}
        self.keys: dict[str, str] = {}

    def put(self, content: bytes) -> str:
        """Store ``content`` durably, or prepare it for ``Change.keep``; returns its digest."""
        digest = digest_of(content)
        if self._blobs.is_small(len(content)):
            self.add_small(content, digest)
            return digest
        self._hold(digest)
        if self._blobs.bucket is None and self._blobs._has(digest):
            return digest
        temporary = self._blobs.temporary()
        try:
            temporary.write_bytes(content)
            self._write(temporary, digest)
        finally:
            # A full disk is not to be made fuller by each attempt.
            temporary.unlink(missing_ok=True)
        return digest

    def add_small(self, content: bytes, digest: str) -> None:
        """Prepare a small blob for ``Change.keep``: a row, even if an earlier version has stored a file."""
        self._hold(digest)
        self.small[digest] = content

    def adopt(self, temporary: Path, digest: str) -> None:
        """Store the file at ``temporary``, whose content has ``digest``, durably as a blob."""
        self._hold(digest)
        if self._blobs.bucket is None and self._blobs._has(digest):
            temporary.unlink()
        else:
            self._write(temporary, digest)

    def _write(self, temporary: Path, digest: str) -> None:
        if self._blobs.bucket is None:
            self._blobs._keep(temporary, digest)
        elif digest not in self.keys:
            # Also where the same bytes have an object: whether that is whole, nobody would know without reading it.
            self.keys[digest] = self._blobs._put(temporary, digest)

    def _hold(self, digest: str) -> None:
        # Before the look at the disk: from here on the file is not removed, whether it is there or not.
        self._blobs._note(digest)
        self.digests.append(digest)


def _version(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written to, replaced or renamed; None: it cannot be looked at."""
    try:
        about = path.stat()
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _name(digest: str) -> str:
    return digest.removeprefix(PREFIX)


def _expect(digest: str, path: Path | None, content: bytes | None) -> None:
    """Raise DamagedBlob unless the row's ``content`` has this digest; the file at ``path`` is known not to have it."""
    if content is not None and digest_of(content) == digest:
        return
    if path is None and content is None:
        raise DamagedBlob(digest, "is missing")
    actual = digest_of(content) if content is not None else digest_of_file(path) if path is not None else None
    raise DamagedBlob(digest, "cannot be read" if actual is None else f"has changed: its digest is {actual} now")
