"""Who carries out which federation, where several coordinators work on one database.

Each coordinator says every second that it is there. A federation has a lease: its holder, and an epoch that grows with
every change of holder. Whoever finds a lease free, or its holder silent for ``LEASE_SECONDS``, takes it over. Every
transaction on a federation first looks at its lease, and keeps it from being taken until it is over: who was paused
and comes back finds another epoch, and commits nothing. All times are the database's.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Engine, Float, Integer, and_, cast, delete, func, insert, literal, literal_column, select, update
from sqlalchemy.orm import Session

from promptfed.coordinator.store.tables import DELETING, CoordinatorRow, FederationRow, LeaseRow

LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
FORGOTTEN_SECONDS = 3600.0  # after which a coordinator that was not seen is no longer listed
NOW = literal_column("extract(epoch FROM clock_timestamp())::double precision", Float)


class Fenced(Exception):
    """The federation is another coordinator's: nothing may be written of it here."""


@dataclass(frozen=True)
class Place:
    """A federation by name, and the address of who carries it out; None while nobody does."""

    id: str
    name: str
    url: str | None


@dataclass(frozen=True)
class Look:
    """What a look has found: federations that are another's now, and those that nobody carries out."""

    lost: list[str]
    free: list[str]


class Leases:
    """The leases of one coordinator, which is reached at ``url``.

    ``held``: epochs of the leases that it has, by federation. ``engine`` makes connections of its own, so that no
    transaction on federations delays what is said here; ``backend``: the process id of the session that writes them.
    """

    def __init__(self, engine: Engine, url: str, backend: Callable[[], int | None]):
        self.id = secrets.token_hex(8)
        self.url = url
        self.held: dict[str, int] = {}
        self._engine = engine
        self._backend = backend
        self._renewed = float("-inf")
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._places: dict[str, Place] = {}

    @property
    def stale(self) -> bool:
        """Whether all leases may be others' by now: this coordinator has said too long ago that it is there."""
        return time.monotonic() - self._renewed > LEASE_SECONDS

    def place(self, asked: str) -> Place | None:
        """The federation with this id or name, as the last look has found it."""
        return self._places.get(asked)

    def places(self) -> set[str]:
        """Ids and names of all federations that the last look has found."""
        return set(self._places)

    def register(self) -> None:
        """Be there from now on; a coordinator of before at the same address is not any more. Raises SQLAlchemyError."""
        with self._session() as session:
            gone = (CoordinatorRow.url == self.url) | (CoordinatorRow.seen < NOW - FORGOTTEN_SECONDS)
            session.execute(delete(CoordinatorRow).where(gone))

    @contextmanager
    def renew(self) -> Iterator[Look]:
        """Say that this coordinator is there, and look at all leases. Raises SQLAlchemyError.

        It is fresh at the end of the block, in which the caller lets go of what was lost: whoever was paused for long
        answers nothing before that.
        """
        asked = time.monotonic()
        with self._session() as session:
            self._say_so(session)
            self._add_missing(session)
        yield self.look()
        self._renewed = asked

    def look(self) -> Look:
        """Look at all leases. Raises SQLAlchemyError."""
        begun = time.monotonic()
        before = set(self.held)
        with self._session() as session:
            alive = and_(LeaseRow.holder == CoordinatorRow.id, CoordinatorRow.seen > NOW - LEASE_SECONDS)
            rows = session.execute(
                select(
                    FederationRow.id,
                    FederationRow.name,
                    FederationRow.state,
                    LeaseRow.holder,
                    LeaseRow.epoch,
                    CoordinatorRow.url,
                )
                .outerjoin(LeaseRow, LeaseRow.federation_id == FederationRow.id)
                .outerjoin(CoordinatorRow, alive)
                .order_by(FederationRow.created_at)
            ).all()
        with self._lock:
            held = dict(self.held)
        found = {row.id: row for row in rows}
        lost = [id for id in before & set(held) if id not in found or not self._is_mine(found[id], held[id])]
        free = [row.id for row in rows if row.url is None or (row.holder == self.id and row.id not in held)]
        shown = [row for row in rows if row.state != DELETING]
        by_id = {row.id: Place(row.id, row.name, row.url) for row in shown}
        self._places = {row.name: by_id[row.id] for row in shown} | by_id
        self._looked = begun
        return Look(lost, free)

    def look_again(self) -> None:
        """See what had been committed when this was called; however many ask, one looks. Raises SQLAlchemyError."""
        asked = time.monotonic()
        with self._looking:
            if self._looked < asked:
                self.look()

    def take(self, id: str) -> bool:
        """Take a lease that nobody holds, or whose holder is silent; whether it is this coordinator's now.

        Whoever stopped in the middle of a transaction on it is hung up, and the lease taken at the next attempt.
        Raises SQLAlchemyError.
        """
        with self._session() as session:
            mine = select(LeaseRow.holder, LeaseRow.epoch).where(LeaseRow.federation_id == id)
            row = session.execute(mine.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                self._hang_up(session, id)
                return False
            if row.holder != self.id and self._is_there(session, row.holder):
                return False
            taken = update(LeaseRow).where(LeaseRow.federation_id == id).values(holder=self.id, epoch=row.epoch + 1)
            session.execute(taken)
            epoch = int(row.epoch) + 1
        with self._lock:
            self.held[id] = epoch
        return True

    def add(self, session: Session, id: str) -> None:
        """In the transaction that creates a federation: it is this coordinator's."""
        session.execute(insert(LeaseRow).values(federation_id=id, holder=self.id, epoch=1))

    def added(self, id: str, name: str) -> None:
        """That transaction is committed."""
        place = Place(id, name, self.url)
        with self._lock:
            self.held[id] = 1
        self._places = {**self._places, name: place, id: place}

    def check(self, session: Session, id: str) -> None:
        """Keep a lease until the transaction is over. Raises Fenced where it is not this coordinator's."""
        with self._lock:
            epoch = self.held.get(id)
        mine = (LeaseRow.federation_id == id, LeaseRow.holder == self.id, LeaseRow.epoch == epoch)
        if (
            epoch is None
            or session.execute(select(LeaseRow.epoch).where(*mine).with_for_update(read=True)).first() is None
        ):
            raise Fenced(id)

    def removed(self, id: str) -> None:
        """It is deleted for everybody: nobody is to look for it elsewhere."""
        self._places = {key: place for key, place in self._places.items() if place.id != id}

    def let_go(self, id: str) -> None:
        """Another one holds it, or it is deleted."""
        with self._lock:
            self.held.pop(id, None)

    def let_go_of_all(self) -> None:
        """What is held in memory may be behind the tables: all is taken again."""
        with self._lock:
            self.held.clear()

    def release(self) -> None:
        """Give all leases to whoever is there, and be there no longer. Raises SQLAlchemyError."""
        self.let_go_of_all()
        with self._session() as session:
            session.execute(update(LeaseRow).where(LeaseRow.holder == self.id).values(holder=None))
            session.execute(delete(CoordinatorRow).where(CoordinatorRow.id == self.id))

    def close(self) -> None:
        """Let go of its connections."""
        self._engine.dispose()

    def _is_mine(self, row: object, epoch: int) -> bool:
        return (getattr(row, "holder", None), getattr(row, "epoch", None)) == (self.id, epoch)

    def _say_so(self, session: Session) -> None:
        known = {"seen": NOW, "backend": self._backend()}
        done = session.execute(update(CoordinatorRow).where(CoordinatorRow.id == self.id).values(**known))
        if done.rowcount == 0:  # type: ignore[attr-defined]
            session.execute(insert(CoordinatorRow).values(id=self.id, url=self.url, **known))

    def _add_missing(self, session: Session) -> None:
        """Leases of federations that a coordinator has created which was alone."""
        missing = ~select(LeaseRow.epoch).where(LeaseRow.federation_id == FederationRow.id).exists()
        ids = list(session.scalars(select(FederationRow.id).where(missing)))
        for id in ids:
            there_is_one = select(LeaseRow.epoch).where(LeaseRow.federation_id == id).exists()
            row = select(literal(id), literal(0)).where(~there_is_one)
            session.execute(insert(LeaseRow).from_select(["federation_id", "epoch"], row))

    def _is_there(self, session: Session, holder: str | None) -> bool:
        seen = (CoordinatorRow.id == holder, CoordinatorRow.seen > NOW - LEASE_SECONDS)
        return session.execute(select(CoordinatorRow.id).where(*seen)).first() is not None

    def _hang_up(self, session: Session, id: str) -> None:
        """End the session of a silent holder that keeps its lease locked: it has stopped in a transaction."""
        query = (
            select(func.pg_terminate_backend(cast(CoordinatorRow.backend, Integer)))  # it takes no bigint
            .join(LeaseRow, LeaseRow.holder == CoordinatorRow.id)
            .where(LeaseRow.federation_id == id, CoordinatorRow.seen <= NOW - LEASE_SECONDS)
            .where(CoordinatorRow.id != self.id, CoordinatorRow.backend.is_not(None))
        )
        session.execute(query).all()

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session
