"""Leases: which of several coordinators on one database runs which federation.

Each coordinator writes a sign of life every second. A federation's lease has a holder, and an epoch that grows with
every change of holder. A coordinator takes a lease that is free, or whose holder was silent for ``LEASE_SECONDS``.
Every transaction on a federation first locks its lease: a coordinator that was paused and continues finds another
epoch, and commits nothing. All times are the database's.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Engine, Float, Integer, cast, delete, func, insert, literal, literal_column, or_, select, update
from sqlalchemy.orm import Session

from promptfed.coordinator.store.tables import DELETING, CoordinatorRow, FederationRow, LeaseRow

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
FORGOTTEN_SECONDS = 3600.0  # after which a coordinator that was not seen is no longer listed
HANG_UP_SECONDS = 0.1  # until the locks of a disconnected session are gone
NOW = literal_column("extract(epoch FROM clock_timestamp())::double precision", Float)


class Fenced(Exception):
    """Another coordinator holds the federation's lease: this one must not write."""


@dataclass(frozen=True)
class Place:
    """A federation, and the address of the coordinator that runs it (None: nobody does)."""

    id: str
    name: str
    url: str | None


@dataclass(frozen=True)
class LeaseLook:
    """What one look at all leases tells. ``lost``: federations whose lease this coordinator had.

    free: federations that no living coordinator holds, or this one without knowing the epoch; oldest first.
    """

    lost: list[str]
    free: list[str]


class Leases:
    """The leases of one coordinator, whose address is ``url``.

    held: epochs of its leases, by federation. addresses: of all coordinators, those that are there first. engine:
    separate connections, so that transactions on federations do not delay signs of life. backend: the database's
    process id of the session that writes federations.
    """

    def __init__(self, engine: Engine, url: str, backend: Callable[[], int | None]):
        self.id = secrets.token_hex(8)
        self.url = url
        self.held: dict[str, int] = {}
        self.addresses: list[str] = [url]
        self._engine = engine
        self._backend = backend
        self._renewed = float("-inf")
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._places: dict[str, Place] = {}

    @property
    def stale(self) -> bool:
        """Whether others may have taken all leases: the last sign of life is too old."""
        return time.monotonic() - self._renewed > LEASE_SECONDS

    def place(self, asked: str) -> Place | None:
        """The federation with this id or name, as of the last look."""
        return self._places.get(asked)

    def register(self) -> None:
        """Remove earlier coordinators at the same address. Raises SQLAlchemyError."""
        with self._session() as session:
            gone = (CoordinatorRow.url == self.url) | (CoordinatorRow.seen < NOW - FORGOTTEN_SECONDS)
            session.execute(delete(CoordinatorRow).where(gone))

    @contextmanager
    def renew(self) -> Iterator[LeaseLook]:
        """Write a sign of life, and look at all leases. Raises SQLAlchemyError.

        The leases are fresh at the end of the block, in which the caller lets go of those that were lost: a
        coordinator that was paused for long answers nothing before that.
        """
        asked = time.monotonic()
        with self._session() as session:
            self._say_so(session)
            self._add_missing(session)
        yield self.look()
        self._renewed = asked

    def look(self) -> LeaseLook:
        """Look at all leases. Raises SQLAlchemyError."""
        begun = time.monotonic()
        before = set(self.held)
        with self._session() as session:
            is_there = (CoordinatorRow.seen > NOW - LEASE_SECONDS).label("is_there")
            coordinators = session.execute(select(CoordinatorRow, is_there).order_by(CoordinatorRow.url)).all()
            rows = session.execute(
                select(FederationRow.id, FederationRow.name, FederationRow.state, LeaseRow.holder, LeaseRow.epoch)
                .outerjoin(LeaseRow, LeaseRow.federation_id == FederationRow.id)
                .order_by(FederationRow.created_at)
            ).all()
        urls = {row.id: row.url for row, is_there in coordinators if is_there}
        by_presence = sorted(coordinators, key=lambda found: not found.is_there)
        self.addresses = list(dict.fromkeys(found.CoordinatorRow.url for found in by_presence))
        with self._lock:
            held = dict(self.held)
        mine = {row.id: row.epoch for row in rows if row.holder == self.id}
        shown = [row for row in rows if row.state != DELETING]
        by_id = {row.id: Place(row.id, row.name, urls.get(row.holder)) for row in shown}
        self._places = {row.name: by_id[row.id] for row in shown} | by_id
        self._looked = begun
        return LeaseLook(
            lost=[id for id in before & set(held) if mine.get(id) != held[id]],
            free=[row.id for row in rows if row.holder not in urls or (row.id in mine and row.id not in held)],
        )

    def look_again(self) -> None:
        """Look at all leases unless another thread has done so since the call. Raises SQLAlchemyError."""
        asked = time.monotonic()
        with self._looking:
            if self._looked < asked:
                self.look()

    def take(self, ids: Sequence[str]) -> list[str]:
        """Take leases that are free or whose holder is silent; returns those that this coordinator holds now.

        A silent holder that stopped within a transaction is disconnected. Raises SQLAlchemyError.
        """
        taken = self._take(ids)
        if locked := set(ids) - set(taken):
            with self._session() as session:
                hung_up = self._hang_up(session, locked)
            if hung_up:
                time.sleep(HANG_UP_SECONDS)
                taken += self._take(list(locked))
        return taken

    def _take(self, ids: Sequence[str]) -> list[str]:
        there = select(CoordinatorRow.id).where(
            CoordinatorRow.id == LeaseRow.holder,
            CoordinatorRow.id != self.id,
            CoordinatorRow.seen > NOW - LEASE_SECONDS,
        )
        free = (LeaseRow.federation_id.in_(ids), or_(LeaseRow.holder.is_(None), ~there.exists()))
        query = select(LeaseRow.federation_id, LeaseRow.epoch).where(*free)
        with self._session() as session:
            rows = session.execute(query.with_for_update(skip_locked=True, of=LeaseRow)).all()
            epochs = {row.federation_id: int(row.epoch) + 1 for row in rows}
            session.execute(
                update(LeaseRow)
                .where(LeaseRow.federation_id.in_(epochs))
                .values(holder=self.id, epoch=LeaseRow.epoch + 1),
                execution_options={"synchronize_session": False},
            )
        with self._lock:
            self.held.update(epochs)
        return [id for id in ids if id in epochs]

    def add(self, session: Session, id: str) -> None:
        """Insert this coordinator's lease, in the transaction that creates a federation."""
        session.execute(insert(LeaseRow).values(federation_id=id, holder=self.id, epoch=1))

    def added(self, id: str, name: str) -> None:
        """Note the lease of a federation whose creation is committed."""
        place = Place(id, name, self.url)
        with self._lock:
            self.held[id] = 1
        self._places = {**self._places, name: place, id: place}

    def check(self, session: Session, id: str) -> None:
        """Lock a lease until the transaction ends. Raises Fenced where another coordinator holds it."""
        with self._lock:
            epoch = self.held.get(id)
        mine = (LeaseRow.federation_id == id, LeaseRow.holder == self.id, LeaseRow.epoch == epoch)
        if (
            epoch is None
            or session.execute(select(LeaseRow.epoch).where(*mine).with_for_update(read=True)).first() is None
        ):
            raise Fenced(id)

    def removed(self, id: str) -> None:
        """Forget the place of a deleted federation."""
        self._places = {key: place for key, place in self._places.items() if place.id != id}

    def let_go(self, id: str) -> None:
        """Forget a lease that another coordinator holds, or of a deleted federation."""
        with self._lock:
            self.held.pop(id, None)

    def let_go_of_all(self) -> None:
        """Forget all leases, since memory may be older than the tables; they are taken again."""
        with self._lock:
            self.held.clear()

    def release(self) -> None:
        """Release all leases, and remove this coordinator. Raises SQLAlchemyError."""
        self.let_go_of_all()
        with self._session() as session:
            session.execute(update(LeaseRow).where(LeaseRow.holder == self.id).values(holder=None))
            session.execute(delete(CoordinatorRow).where(CoordinatorRow.id == self.id))

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _say_so(self, session: Session) -> None:
        known = {"seen": NOW, "backend": self._backend()}
        done = session.execute(update(CoordinatorRow).where(CoordinatorRow.id == self.id).values(**known))
        if done.rowcount == 0:  # type: ignore[attr-defined]
            session.execute(insert(CoordinatorRow).values(id=self.id, url=self.url, **known))

    def _add_missing(self, session: Session) -> None:
        """Insert leases of federations that a coordinator without leases has created."""
        missing = ~select(LeaseRow.epoch).where(LeaseRow.federation_id == FederationRow.id).exists()
        ids = list(session.scalars(select(FederationRow.id).where(missing)))
        for id in ids:
            there_is_one = select(LeaseRow.epoch).where(LeaseRow.federation_id == id).exists()
            row = select(literal(id), literal(0)).where(~there_is_one)
            session.execute(insert(LeaseRow).from_select(["federation_id", "epoch"], row))

    def _hang_up(self, session: Session, ids: Collection[str]) -> bool:
        """Disconnect silent holders that keep these leases locked: they stopped within a transaction. Whether any."""
        silent = (
            select(CoordinatorRow.backend)
            .join(LeaseRow, LeaseRow.holder == CoordinatorRow.id)
            .where(LeaseRow.federation_id.in_(ids), CoordinatorRow.seen <= NOW - LEASE_SECONDS)
            .where(CoordinatorRow.id != self.id, CoordinatorRow.backend.is_not(None))
        )
        backends = set(session.scalars(silent))
        for backend in backends:
            session.execute(select(func.pg_terminate_backend(cast(backend, Integer))))  # it takes no bigint
        return bool(backends)

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session
