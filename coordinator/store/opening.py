"""Opening the store: the data folder with its lock, signing key and tokens, and the database that belongs to it."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.blobs import BlobRows, Blobs
from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway
from promptfed.coordinator.store.database import (
    Backend,
    CannotOpen,
    Database,
    DatabaseAway,
    InUse,
    PostgreSQL,
    SQLite,
    one_line,
)
from promptfed.coordinator.store.tables import FederationRow, ObjectRow, StoreRow
from promptfed.coordinator.store.turns import ObjectsWatch, Turn
from promptfed.shared import machine
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

log = logging.getLogger("promptfed.coordinator")
ID_FILE = "store.id"
SQLITE_FILE = "coordinator.sqlite3"
FRESH_SECONDS = 1.0  # for which an answer holds: whoever asks all the time is not to keep the disk busy
PROBE_BYTES = 64 << 10
KEY_FILE = "signing.key"
OPERATOR_FILE = "operator.token"
SHORTEST = 32


class FolderInUse(InUse):
    """Another coordinator uses the folder."""


class FolderLock:
    """A lock that the system releases when the process ends. Its file holds the process id."""

    def __init__(self, folder: Path):
        self._path = folder / "lock"
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises FolderInUse."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if not machine.try_lock(handle):
            os.close(handle)
            text = f"another coordinator works on {self._path.parent}: stop it, or give another --data-dir"
            raise FolderInUse(text)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle

    def release(self) -> None:
        """Free the folder for another coordinator."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


@dataclass
class Store:
    """The opened folder, database and blobs; ``turn``: this coordinator's, where several wait for each other."""

    lock: FolderLock
    database: Database
    blobs: Blobs
    turn: Turn | None = None

    def close(self) -> None:
        """Close the database, then free the folder for another coordinator."""
        if self.turn is not None:
            self.turn.end()
        self.database.close()
        self.lock.release()


def open_store(settings: Settings) -> Store:
    """Lock the data folder and the database, waiting for the database, and upgrade its tables.

    Raises:
        CannotOpen: another coordinator uses one of them, or they do not fit this version or each other.
        DatabaseAway: the database did not answer in time.
        OSError: the folder cannot be used.
    """
    database = Database(backend_of(settings))
    bucket = bucket_of(settings)
    lock = lock_folder(settings)
    try:
        database.connect(settings.database_wait_seconds)
        with _reached():
            return _opened(settings, lock, database, bucket)
    except BaseException:
        database.close()
        lock.release()
        raise


class Waiting:
    """One of several coordinators on one database and object store: it waits for its turn, again and again."""

    def __init__(self, settings: Settings):
        """Lock the data folder. Raises CannotOpen, OSError."""
        self._settings = settings
        self._holder = secrets.token_hex(8)
        self._bucket = bucket_of(settings)
        self._stopped = threading.Event()
        self._lock = lock_folder(settings)
        self._objects = ObjectsWatch(self._bucket) if self._bucket is not None else None

    def next_store(self) -> Store | None:
        """Wait until nobody else works, then open the store; None once `stop` was called. Raises as `open_store`."""
        settings = self._settings
        database = Database(backend_of(settings, self._holder))
        turn = Turn(database, self._objects.answers if self._objects is not None else lambda: True)
        try:
            if turn.take(self._stopped.is_set, settings.database_wait_seconds):
                database.backend.check()
                return replace(_opened(settings, FolderLock(settings.data_dir), database, self._bucket), turn=turn)
            database.close()
        except BaseException:
            turn.end()
            database.close()
            raise
        return None

    def stop(self) -> None:
        """Wait no more."""
        self._stopped.set()

    def close(self) -> None:
        """Free the data folder."""
        if self._objects is not None:
            self._objects.end()
        self._lock.release()


def lock_folder(settings: Settings) -> FolderLock:
    """Make and lock the data folder. Raises FolderInUse, OSError."""
    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _close_to_others(folder)
    lock = FolderLock(folder)
    lock.acquire()
    return lock


def _opened(settings: Settings, lock: FolderLock, database: Database, bucket: Bucket | None) -> Store:
    database.migrate()
    blobs = Blobs(settings.data_dir, BlobRows(database), bucket)
    blobs.open()
    name = _tie(settings, blobs, database)
    _tie_objects(bucket, database, name)
    return Store(lock, database, blobs)


def open_to_look(settings: Settings) -> Store:
    """Lock the data folder and the database without changing them: nothing is created, removed or upgraded.

    Raises:
        CannotOpen: another coordinator uses one of them, or they are not of this version.
        DatabaseAway: the database did not answer in time.
        OSError: the folder cannot be used.
    """
    folder = settings.data_dir
    database = Database(backend_of(settings.model_copy(update={"advertise_url": None})))
    bucket = bucket_of(settings)
    if not (folder / ID_FILE).exists():
        raise CannotOpen(f"{folder} is no coordinator's data folder: give --data-dir as it was used before")
    lock = FolderLock(folder)
    lock.acquire()
    try:
        if database.backend.in_folder and not (folder / SQLITE_FILE).exists():
            raise CannotOpen(f"the database {folder / SQLITE_FILE} is missing: put a backup back")
        database.connect(settings.database_wait_seconds)
        database.expect_this_version()
        blobs = Blobs(folder, BlobRows(database), bucket, copies=False)
        if bucket is not None:
            blobs.open()  # What is looked at passes through the folder.
            with _reached():
                _expect_objects(bucket, database, (folder / ID_FILE).read_text().strip())
        return Store(lock, database, blobs)
    except BaseException:
        database.close()
        lock.release()
        raise


@contextmanager
def _reached() -> Iterator[None]:
    """A block at whose start an object store that is away is an error."""
    try:
        yield
    except ObjectStoreAway as error:
        raise CannotOpen(str(error)) from None


def _close_to_others(folder: Path) -> None:
    """Set mode 0700 also on an existing folder: it holds the database and the updates."""
    if folder.stat().st_mode & 0o077 == 0:
        return
    try:
        folder.chmod(0o700)
    except PermissionError:
        log.warning("%s belongs to another user, and others may read what is in it: give it to this one", folder)


def backend_of(settings: Settings, holder: str = "") -> Backend:
    """The database that the settings name; ``holder``: this coordinator's id among several. Raises CannotOpen."""
    url = settings.url()
    if url is None:
        return SQLite(settings.data_dir / SQLITE_FILE)
    return PostgreSQL(url, settings.advertise_url, holder)


def bucket_of(settings: Settings) -> Bucket | None:
    """The object store that the settings name. Raises CannotOpen."""
    return Bucket(settings.store) if settings.store is not None else None


def _tie(settings: Settings, blobs: Blobs, database: Database) -> str:
    """Give a new folder and a new database one name, and refuse two that do not belong together. Returns the name.

    Files that no row refers to are removed later: with the database of another folder that would be all of them.
    """
    folder = settings.data_dir
    file = folder / ID_FILE
    in_folder = file.read_text().strip() if file.exists() else None
    with database.write() as session:
        row = session.scalars(select(StoreRow)).one_or_none()
        if row is not None and row.id == in_folder:
            return row.id
        # Among several coordinators what lies in one's folder are copies.
        beside = (database.backend.in_folder or settings.advertise_url is not None) and in_folder is None
        empty = session.scalars(select(FederationRow.id).limit(1)).first() is None and not blobs.files()
        if not beside and (in_folder is not None or not empty):
            raise CannotOpen(
                f"the blobs in {folder} and the database at {database.backend.place} do not belong together: give "
                "--data-dir and --database-url as they were used before, or a new folder and an empty database"
            )
        if row is None:
            row = StoreRow(id=secrets.token_hex(16))
            session.add(row)
    write_whole(file, f"{row.id}\n".encode())
    return row.id


def _tie_objects(bucket: Bucket | None, database: Database, name: str) -> None:
    """As ``_tie`` for an object store, whose objects without rows are removed too."""
    if not _expect_objects(bucket, database, name) and bucket is not None:
        bucket.give_name(name)


def _expect_objects(bucket: Bucket | None, database: Database, name: str) -> bool:
    """Whether the bucket has this database's name (False: it has none yet).

    Raises CannotOpen for another name, ObjectStoreAway.
    """
    with database.read() as session:
        any_row = session.scalars(select(ObjectRow.digest).limit(1)).first() is not None
    if bucket is None:
        if any_row:
            text = f"the database at {database.backend.place} names objects of an object store"
            raise CannotOpen(f"{text}: give --store as it was used before")
        return True
    name_there = bucket.name()
    strange = name_there is None and (any_row or next(bucket.blobs(), None) is not None)
    if strange or name_there not in (None, name):
        raise CannotOpen(
            f"the objects at {bucket.place} and the database at {database.backend.place} do not belong together: give "
            "--store and the database as they were used before, or a new prefix and an empty database"
        )
    return name_there is not None


class Writable:
    """Checks on demand, at most once in ``FRESH_SECONDS``."""

    def __init__(self, database: Database, blobs: Blobs):
        self._database = database
        self._blobs = blobs
        self._lock = threading.Lock()
        self._looked = -FRESH_SECONDS
        self._why: str | None = None
        self._cause = ""

    def why_not(self) -> str | None:
        """Why nothing can be written, without names of files and addresses; None if writing works."""
        with self._lock:
            if time.monotonic() - self._looked >= FRESH_SECONDS:
                before, self._why = self._why, self._look()
                self._looked = time.monotonic()
                if self._why not in (None, before):
                    log.error("%s: %s", self._why, self._cause)
            return self._why

    def _look(self) -> str | None:
        try:
            with self._database.write() as session:
                session.execute(text("UPDATE store SET id = id"))
            self._write_a_file()
            if self._blobs.bucket is not None:
                self._blobs.bucket.probe()
        except (SQLAlchemyError, OSError, DatabaseAway) as error:
            self._cause = one_line(getattr(error, "orig", None) or error)
            if self._database.is_full(error):
                return "nothing can be written: the disk is full, make room"
            what = (
                "the object store does not answer" if isinstance(error, ObjectStoreAway) else "nothing can be written"
            )
            return f"{what}: the coordinator's log says why"
        return None

    def _write_a_file(self) -> None:
        path = self._blobs.temporary()
        try:
            with path.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)


class Signer:
    """Signs with the key of a data folder, which the first start creates, or with a ``given`` one.

    Raises:
        CannotOpen: the file holds no Ed25519 key, or the given file does not exist.
    """

    def __init__(self, data_dir: Path, given: Path | None = None):
        path = given or data_dir / KEY_FILE
        if given is not None and not given.exists():
            raise CannotOpen(f"--signing-key-file {given} is missing: openssl genpkey -algorithm ed25519 -out {given}")
        if not path.exists():
            made = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_whole(path, made, mode=0o600)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise CannotOpen(f"{path} holds no Ed25519 key: put back the one that was there, or delete it for another")
        self._key = key
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public_key = raw.hex()

    def sign(self, said: bytes) -> str:
        """The signature, in hexadecimal."""
        return self._key.sign(said).hex()


def digest(token: str) -> str:
    """SHA-256 of a token in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_hex(32)


def operator_token(data_dir: Path) -> str:
    """The operator token of a data folder, created at the first start. Only the folder's owner can read it."""
    path = data_dir / OPERATOR_FILE
    if path.exists():
        return path.read_text().strip()
    token = new_token()
    write_secret(path, token)
    return token


def given_operator_token(path: Path) -> str:
    """The operator token in a file that several coordinators share. Raises CannotOpen."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotOpen(f"--operator-token-file {path} cannot be read: {why(error)}") from None
    if len(token) < SHORTEST:
        raise CannotOpen(f"--operator-token-file {path} holds no token of {SHORTEST} characters: openssl rand -hex 32")
    return token


def write_secret(path: Path, text: str) -> None:
    """Write ``text`` atomically to a file that only its owner can read."""
    write_whole(path, f"{text}\n".encode(), mode=0o600)
