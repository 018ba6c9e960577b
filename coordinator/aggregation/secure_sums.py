"""One attempt at a secure sum, from the database: the payloads of its steps, and the sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import CONFIRM, MASK, SHARE, TRAIN, UNMASK
from promptfed.coordinator.domain.run_state import SecureStep
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import ExchangeRow, PhaseRow, TaskRow
from promptfed.shared.messages import TaskKind
from promptfed.shared.methods.core.interface import Phase
from promptfed.shared.secagg import opening
from promptfed.shared.secagg.messages import (
    ConfirmAnswer,
    ConfirmJob,
    KeysAnswer,
    Roster,
    SharesAnswer,
    UnmaskAnswer,
    make_roster,
)
from promptfed.shared.secagg.primitives import Whole, Words, signed_sum
from promptfed.shared.spec.sections import Weighting
from promptfed.shared.tensors import Shape, decode

MASKED = "masked"


class Attempt:
    """An attempt of ``federation`` at ``round``, from ``step.first`` on; stages that have closed never change."""

    def __init__(self, database: Database, federation: Federation, round: int, step: SecureStep):
        self._database = database
        self._id, self._round, self._first = federation.id, round, step.first
        assert federation.spec.secure_aggregation is not None
        self._spec = federation.spec.secure_aggregation
        self._rule = Weighting.of(federation.spec.aggregation)

    def _answers(self, index: int) -> dict[str, bytes]:
        with self._database.read() as session:
            return answers(session, self._id, self._round, self._first + index)

    @cached_property
    def _made(self) -> tuple[Roster, dict[int, KeysAnswer], dict[str, int]]:
        given = {client: KeysAnswer.model_validate_json(body) for client, body in self._answers(TRAIN).items()}
        roster, signed = make_roster(given.values(), self._spec, self._rule)
        return roster, signed, {client: roster.place_of(answer.entry) for client, answer in given.items()}

    @property
    def roster(self) -> Roster:
        """The clients that sent keys."""
        return self._made[0]

    def place(self, client: str) -> int:
        """The index of ``client`` in the roster."""
        return self._made[2][client]

    @cached_property
    def shares(self) -> dict[int, SharesAnswer]:
        """The dealt shares and the commitments to them, by the dealer's index in the roster."""
        return {self.place(c): SharesAnswer.model_validate_json(body) for c, body in self._answers(SHARE).items()}

    @cached_property
    def confirm(self) -> ConfirmJob:
        """The clients that dealt shares, and which of them sent masked vectors."""
        with self._database.read() as session:
            masked = queries.counted_clients(session, self._id, self._round, self._first + MASK)
        return opening.confirm_job(list(self.shares), [self.place(client) for client in masked])

    @cached_property
    def _confirmed(self) -> dict[int, ConfirmAnswer]:
        return {self.place(c): ConfirmAnswer.model_validate_json(body) for c, body in self._answers(CONFIRM).items()}

    def told(self, client: str, kind: TaskKind) -> bytes:
        """The payload of step ``kind`` for ``client``, as JSON."""
        place = self.place(client)
        if kind == "share":
            return self.roster.message(self._made[1]).model_dump_json().encode()
        if kind == "mask":
            return opening.mask_job(self.roster, place, self.shares).model_dump_json().encode()
        if kind == "confirm":
            return self.confirm.model_dump_json().encode()
        return opening.unmask_job(self._confirmed).model_dump_json().encode()

    def can_open(self, clients: list[str]) -> bool:
        """Whether the shares of ``clients`` suffice to open every secret that the sum needs."""
        return len(clients) >= self.roster.threshold

    @property
    def weight(self) -> float:
        """Σ a over the clients in the sum; exact, since weights are multiples of 1/65,536."""
        return sum(self.roster.weights[place] for place in self.confirm.alive)

    def total(self) -> Whole:
        """``(d,)`` int64: the sum. Raises SecureError: ``bad-shares`` or ``sum-invalid``."""
        reveals = {self.place(c): UnmaskAnswer.model_validate_json(body) for c, body in self._answers(UNMASK).items()}
        return signed_sum(opening.open_sum(self.roster, self.confirm, self._vectors(), reveals, self.shares))

    def _vectors(self) -> Iterator[Words]:
        with self._database.read() as session:
            clients = queries.counted_clients(session, self._id, self._round, self._first + MASK)
        for client in clients:
            with self._database.read() as session:
                body = answers(session, self._id, self._round, self._first + MASK, client)[client]
            yield vector_of(body)


def vector_of(body: bytes) -> Words:
    """``(d,)`` uint64 of a masked vector as it is sent. Raises TensorError, KeyError."""
    words: Words = decode(body)[0][MASKED].view(np.uint64)
    return words


def answers(session: Session, id: str, round: int, step: int, client: str | None = None) -> dict[str, bytes]:
    """The counted answers to a closed step by client, or that of ``client``."""
    only = () if client is None else (TaskRow.client == client,)
    rows = _answers(session, id, round, step, TaskRow.client, ExchangeRow.body, where=only)
    return {row.client: row.body for row in rows if row.body is not None}


def _answers(
    session: Session, id: str, round: int, step: int, *columns: Any, where: tuple[ColumnElement[bool], ...] = ()
) -> Iterator[Any]:
    """Columns of the counted answers to a closed step, in order of client name."""
    query = queries.tasks_with_phases(id).with_only_columns(*columns)
    joined = query.join(ExchangeRow, ExchangeRow.task_id == TaskRow.id)
    here = (PhaseRow.round == round, PhaseRow.step == step, TaskRow.counted)
    yield from session.execute(joined.where(*here, *where).order_by(TaskRow.client))


def shapes(federation: Federation, phase: Phase) -> dict[str, Shape]:
    """Shapes of the tensors of a phase's updates, which form one vector in order of name."""
    context = federation.context()
    dims = federation.method.dims(context)
    return {spec.name: spec.resolve(dims) for spec in phase.up}


def size_of(tensors: dict[str, Shape]) -> int:
    """The number of entries of these shapes."""
    return sum(math.prod(shape) for shape in tensors.values())
