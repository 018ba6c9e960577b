"""Opening the store: the data folder, its lock and the database, which must belong together."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import Backend, CannotOpen
from promptfed.coordinator.store.blob_rows import BlobRows
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.bucket import Bucket, ObjectStoreAway
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.folder_lock import FolderLock
from promptfed.coordinator.store.leases import Leases
from promptfed.coordinator.store.postgres import PostgreSQL, take_turns
from promptfed.coordinator.store.sqlite import SQLite
from promptfed.coordinator.store.tables import FederationRow, ObjectRow, StoreRow
from promptfed.shared.files import write_whole

log = logging.getLogger("promptfed.coordinator")

ID_FILE = "store.id"
SQLITE_FILE = "coordinator.sqlite3"


@dataclass
class Store:
    """The opened folder, database and blobs; with several coordinators also this one's leases."""

    lock: FolderLock
    database: Database
    blobs: Blobs
    leases: Leases | None = None

    def close(self) -> None:
        """Close the database, then free the folder for another coordinator."""
        self.database.close()
        self.lock.release()


def open_store(settings: Settings) -> Store:
    """Lock the data folder and the database, waiting for the database, and upgrade its tables.

    Raises:
        CannotOpen: another coordinator uses one of them, or they do not fit this version or each other.
        DatabaseAway: the database did not answer in time.
        OSError: the folder cannot be used.
    """
    folder = settings.data_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _close_to_others(folder)
    backend = backend_of(settings)
    database = Database(backend)
    bucket = bucket_of(settings)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        database.connect(settings.database_wait_seconds)
        database.migrate()
        blobs = Blobs(folder, BlobRows(database), bucket, shared=backend.shared)
        blobs.open()
        name = _tie(folder, blobs, database)
        _tie_objects(bucket, database, name)
    except BaseException:
        database.close()
        lock.release()
        raise
    leases = None
    if isinstance(backend, PostgreSQL) and settings.advertise_url is not None:
        leases = Leases(backend.leases, settings.advertise_url.rstrip("/"), lambda: backend.writing)
    return Store(lock, database, blobs, leases)


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
            _expect_objects(bucket, database, (folder / ID_FILE).read_text().strip())
        return Store(lock, database, blobs)
    except BaseException:
        database.close()
        lock.release()
        raise


def _close_to_others(folder: Path) -> None:
    """Set mode 0700 also on an existing folder: it holds the database and the updates."""
    if folder.stat().st_mode & 0o077 == 0:
        return
    try:
        folder.chmod(0o700)
    except PermissionError:
        log.warning("%s belongs to another user, and others may read what is in it: give it to this one", folder)


def backend_of(settings: Settings) -> Backend:
    """The database that the settings name. Raises CannotOpen."""
    url = settings.url()
    if url is None:
        return SQLite(settings.data_dir / SQLITE_FILE)
    return PostgreSQL(url, shared=settings.advertise_url is not None)


def bucket_of(settings: Settings) -> Bucket | None:
    """The object store that the settings name. Raises CannotOpen."""
    return Bucket(settings.store) if settings.store is not None else None


def _tie(folder: Path, blobs: Blobs, database: Database) -> str:
    """Give a new folder and a new database one name, and refuse two that do not belong together. Returns the name.

    Files that no row refers to are removed later: with the database of another folder that would be all of them.
    """
    file = folder / ID_FILE
    in_folder = file.read_text().strip() if file.exists() else None
    with database.write() as session:
        if database.backend.shared:
            take_turns(session.connection())
        row = session.scalars(select(StoreRow)).one_or_none()
        if row is not None and row.id == in_folder:
            return row.id
        # Among several coordinators what lies in one's folder are copies.
        beside = (database.backend.in_folder or database.backend.shared) and in_folder is None
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
    """Whether the bucket has this database's name (False: it has none yet). Raises CannotOpen for another name."""
    with database.read() as session:
        any_row = session.scalars(select(ObjectRow.digest).limit(1)).first() is not None
    if bucket is None:
        if any_row:
            text = f"the database at {database.backend.place} names objects of an object store"
            raise CannotOpen(f"{text}: give --store as it was used before")
        return True
    try:
        name_there = bucket.name()
        strange = name_there is None and (any_row or next(bucket.blobs(), None) is not None)
    except ObjectStoreAway as error:
        raise CannotOpen(str(error)) from None
    if strange or name_there not in (None, name):
        raise CannotOpen(
            f"the objects at {bucket.place} and the database at {database.backend.place} do not belong together: give "
            "--store and the database as they were used before, or a new prefix and an empty database"
        )
    return name_there is not None
