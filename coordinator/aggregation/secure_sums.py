"""Sums that protect clients: a mean of clipped changes with noise, and one attempt at a secure sum.

Central differential privacy protects whole clients. New tensors are base + (Σ_k Δ_k·min(1, S/‖Δ_k‖) + z·S·ξ)/K̄ with
ξ ~ N(0, I): DP-FedAvg with a fixed denominator (McMahan et al., "Learning Differentially Private Recurrent Language
Models", 2018, its estimator f_f). Δ_k is an update minus what its client was given, over all tensors in order of name,
in float64. K̄ is how many were expected when the phase opened, never how many came; without any there is the noise
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.domain.round_machine import CONFIRM, MASK, SHARE, TRAIN, UNMASK
from promptfed.coordinator.domain.run_state import SecureStep
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.database import Database
from promptfed.coordinator.store.tables import ExchangeRow, PhaseRow, TaskRow
from promptfed.shared.messages import TaskKind
from promptfed.shared.methods.core.interface import ClientUpdate, Phase
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.secagg import opening
from promptfed.shared.secagg.masks import Words
from promptfed.shared.secagg.messages import (
    ConfirmAnswer,
    ConfirmJob,
    KeysAnswer,
    Roster,
    SharesAnswer,
    UnmaskAnswer,
    make_roster,
)
from promptfed.shared.secagg.vectors import Whole, signed_sum
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors import Array, Arrays, Shape, decode

Vector = NDArray[np.float64]
MASKED = "masked"


@dataclass(frozen=True)
class NoiseTerms:
    """Terms of one phase's noise. ``key``: 32 secret bytes, used for this noise alone."""

    clip: float
    noise_multiplier: float
    expected: float
    key: bytes

    @property
    def divisor(self) -> float:
        """K̄; where nobody can be in, the noise as it is."""
        return self.expected or 1.0


@dataclass(frozen=True)
class PrivateMean:
    """The tensors after a phase; ``lengths`` of the clients' changes before clipping."""

    tensors: Arrays
    lengths: dict[str, float]


def private_mean(
    updates: Iterable[ClientUpdate], payload: Mapping[str, Array], shapes: Mapping[str, Shape], terms: NoiseTerms
) -> PrivateMean:
    """The clipped and noised mean of ``updates``, which started from ``payload``, as tensors of ``shapes``."""
    names = sorted(shapes)
    size = sum(math.prod(shapes[name]) for name in names)
    base = _base(payload, shapes, names)
    total, lengths = np.zeros(size), {}
    for update in updates:
        change = _flat(update.tensors, names) - base
        length = float(np.linalg.norm(change))
        lengths[update.client] = length
        total += change * min(1.0, terms.clip / length) if length > 0 else change
    stream = NoiseStream(terms.key)
    noised = (total + terms.noise_multiplier * terms.clip * stream.normals(size)) / terms.divisor
    return PrivateMean(_tensors(base + noised, shapes, names), lengths)


def _base(payload: Mapping[str, Array], shapes: Mapping[str, Shape], names: list[str]) -> Vector:
    """The tensors that clients started from; zeros for tensors that the payload does not have."""
    tensors: Arrays = {}
    for name in names:
        before = payload.get(name)
        if before is None or tuple(before.shape) != tuple(shapes[name]):
            before = np.zeros(shapes[name])
        tensors[name] = before
    return _flat(tensors, names)


def _flat(tensors: Mapping[str, Any], names: list[str]) -> Vector:
    return np.concatenate([tensors[name].reshape(-1).astype(np.float64) for name in names])


def _tensors(vector: Vector, shapes: Mapping[str, Shape], names: list[str]) -> Arrays:
    parts = np.split(vector, np.cumsum([math.prod(shapes[name]) for name in names])[:-1])
    return {name: part.reshape(shapes[name]).astype(np.float32) for name, part in zip(names, parts, strict=True)}


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
        entries = {client: KeysAnswer.model_validate_json(body) for client, body in self._answers(TRAIN).items()}
        roster, signed = make_roster(entries.values(), self._spec, self._rule)
        return roster, signed, {client: roster.place_of(answer.entry) for client, answer in entries.items()}

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


def answers(
    session: Session, id: str, round: int, step: int, client: str | None = None, all_sent: bool = False
) -> dict[str, bytes]:
    """The counted answers to a closed step by client, in order of name, or that of ``client``.

    ``all_sent``: those to a step that is open, too.
    """
    query = queries.tasks_with_phases(id).with_only_columns(TaskRow.client, ExchangeRow.body)
    joined = query.join(ExchangeRow, ExchangeRow.task_id == TaskRow.id)
    here: list[Any] = [PhaseRow.round == round, PhaseRow.step == step, ExchangeRow.body.is_not(None)]
    if not all_sent:
        here.append(TaskRow.counted)
    if client is not None:
        here.append(TaskRow.client == client)
    return {row.client: row.body for row in session.execute(joined.where(*here).order_by(TaskRow.client))}


def shapes(federation: Federation, phase: Phase) -> dict[str, Shape]:
    """Shapes of the tensors of a phase's updates, which form one vector in order of name."""
    context = federation.context()
    dims = federation.method.dims(context)
    return {spec.name: spec.resolve(dims) for spec in phase.up}


def size_of(tensors: dict[str, Shape]) -> int:
    """The number of entries of these shapes."""
    return sum(math.prod(shape) for shape in tensors.values())
