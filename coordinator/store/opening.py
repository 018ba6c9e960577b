"""Opening the store: the data folder, and the database and the objects that belong to it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy import select

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import Backend, CannotOpen
from promptfed.coordinator.store.blob_rows import BlobRows
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.folder import ID_FILE, SQLITE_FILE, FolderLock, lock_folder
from promptfed.coordinator.store.form import expect_this_version, migrate
from promptfed.coordinator.store.postgres import PostgreSQL
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import FederationRow, ObjectRow, StoreRow
from promptfed.coordinator.store.turns import ObjectsWatch, Turn
from promptfed.shared.files import write_whole

log = logging.getLogger("promptfed.coordinator")


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
        """End the wait for a turn."""
        self._stopped.set()

    def close(self) -> None:
        """Free the data folder."""
        if self._objects is not None:
            self._objects.end()
        self._lock.release()


def _opened(settings: Settings, lock: FolderLock, database: Database, bucket: Bucket | None) -> Store:
    migrate(database)
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
        expect_this_version(database)
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
    """Give a new object store the database's name, and refuse another's: objects without rows are removed too."""
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
