"""An object store with the S3 protocol: bytes under keys, complete or absent; copies of those read last."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from promptfed.coordinator.store.backend import CannotOpen, one_line
from promptfed.shared import get_extra
from promptfed.shared.machine import own_folder
from promptfed.shared.service.addresses import is_loopback

if TYPE_CHECKING:
    from obstore.store import S3Store

BLOBS = "blobs/"
ID_KEY = "store.id"
PROBE_KEY = "probe/"
AT_ONCE = 1000  # keys that one request removes
PART = 1 << 20
CONNECT = timedelta(seconds=5)
SILENCE = timedelta(seconds=300)  # for one request, however large its body
RETRIES, RETRY_SECONDS = 3, timedelta(seconds=15)
PROBE = timedelta(seconds=2)  # for each request of a probe, which is not repeated
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
MOST_BYTES = 4 << 30
IN_USE_SECONDS = 60.0  # after which nobody to whom a path was given is about to open it: what is mapped stays


class ObjectStoreAway(OSError):
    """The object store does not answer, or refuses; the text says why."""


class NoObject(Exception):
    """There is no object under this key."""


class Bucket:
    """The objects under one prefix of a bucket; ``place`` is its URL.

    Credentials, region and endpoint come from where AWS's own tools take them: ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, a container's or a machine's role.
    """

    def __init__(self, url: str):
        """No request is sent yet. Raises CannotOpen."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise CannotOpen(f"an object store needs its library: {get_extra('s3')}") from None
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError)
        self.place = url
        endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)

        def store(connect: timedelta, seconds: timedelta, retries: int) -> S3Store:
            return S3Store.from_url(
                url,
                config={"endpoint": endpoint} if endpoint is not None else None,
                client_options={"allow_http": _may_be_plain(endpoint), "connect_timeout": connect, "timeout": seconds},
                retry_config={"max_retries": retries, "retry_timeout": RETRY_SECONDS},
            )

        try:
            self._store = store(CONNECT, SILENCE, RETRIES)
            self._impatient = store(PROBE, PROBE, 0)
        except BaseError as error:
            raise CannotOpen(f"--store {url} cannot be used: {_first_line(error)}") from None

    def put(self, key: str, content: bytes | Path) -> None:
        """Store the bytes, or a file's, durably. Raises ObjectStoreAway."""
        with self._answering():
            self._store.put(key, content)

    def parts(self, key: str) -> Iterator[bytes]:
        """The bytes under ``key`` as they come. Raises NoObject, ObjectStoreAway."""
        with self._answering():
            for part in self._store.get(key).stream(min_chunk_size=PART):
                yield bytes(part)

    def read(self, key: str) -> bytes:
        """All bytes under ``key``. Raises NoObject, ObjectStoreAway."""
        return b"".join(self.parts(key))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove the objects under ``keys`` that exist. Raises ObjectStoreAway."""
        ordered = sorted(keys)
        for begin in range(0, len(ordered), AT_ONCE):
            with self._answering():
                self._store.delete(ordered[begin : begin + AT_ONCE])

    def blobs(self) -> Iterator[tuple[str, float]]:
        """Keys of all blobs, and when each was put, in seconds of the epoch. Raises ObjectStoreAway."""
        with self._answering():
            for listed in self._store.list(BLOBS):
                for blob in listed:
                    yield blob["path"], blob["last_modified"].timestamp()

    def name(self) -> str | None:
        """The name by which a database knows this prefix. Raises ObjectStoreAway."""
        try:
            return self.read(ID_KEY).decode().strip()
        except NoObject:
            return None

    def give_name(self, name: str) -> None:
        """Give this prefix its name. Raises ObjectStoreAway."""
        self.put(ID_KEY, f"{name}\n".encode())

    def probe(self, writes: bool = True) -> None:
        """Write, read and remove a small object, or only ask for one, without patience. Raises ObjectStoreAway."""
        key = PROBE_KEY + secrets.token_hex(8) if writes else ID_KEY
        try:
            with self._answering():
                if writes:
                    self._impatient.put(key, b"probe")
                self._impatient.get(key).bytes()
                if writes:
                    self._impatient.delete(key)
        except NoObject:
            if writes:
                text = f"the object store at {self.place} does not have {key}, which was written"
                raise ObjectStoreAway(text) from None

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:  # obstore's word for an object that is not there
            raise NoObject from None
        except self._errors as error:
            raise ObjectStoreAway(f"the object store at {self.place} does not answer: {_first_line(error)}") from None


def fresh_key(digest: str) -> str:
    """A key for bytes with this digest, of ``sha256:<hex>``, that was never used before."""
    name = digest.partition(":")[2]
    return f"{BLOBS}{name[:2]}/{name}.{secrets.token_hex(8)}"


def _may_be_plain(endpoint: str | None) -> bool:
    """Whether unencrypted requests are allowed: to this machine, or where the environment allows them."""
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        return True
    return endpoint is not None and is_loopback(urlsplit(endpoint).hostname or "")


def _first_line(error: Exception) -> str:
    return one_line(str(error).partition("\n\nDebug source")[0])[:500]


class ObjectCache:
    """Copies of objects under their hexadecimal digest, at most ``most`` bytes; copies in use are kept beyond that."""

    def __init__(self, folder: Path, most: int = MOST_BYTES):
        self._folder = folder
        self._most = most
        self._bytes = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the folder, empty."""
        own_folder(self._folder)
        for left in self._folder.iterdir():
            left.unlink()

    def path(self, name: str) -> Path:
        """The path of the copy with that name, which may not exist."""
        return self._folder / name

    def touch(self, name: str) -> None:
        """Note that the copy was used."""
        os.utime(self.path(name))

    def adopt(self, temporary: Path, name: str) -> Path:
        """Move a file into the folder; returns its path there."""
        path, size = self.path(name), temporary.stat().st_size
        with self._lock:
            self._bytes += size - (path.stat().st_size if path.exists() else 0)
            temporary.rename(path)
            if self._bytes > self._most:
                self._shrink()
        return path

    def forget(self, names: Iterable[str]) -> None:
        """Remove the copies of these names."""
        with self._lock:
            for name in names:
                self._remove(self.path(name))

    def _shrink(self) -> None:
        now = time.time()
        by_age = sorted((copy.stat().st_mtime, copy) for copy in self._folder.iterdir())
        for used, copy in by_age:
            if self._bytes <= self._most or now - used < IN_USE_SECONDS:
                return
            self._remove(copy)

    def _remove(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        self._bytes -= size


def write_hashed(parts: Iterator[bytes], path: Path) -> str:
    """Write ``parts`` to a file; their SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()
