"""Membership inference against the updates that a coordinator keeps: what they reveal about a client's images.

It needs the coordinator's data folder and the client's images: operator and owner are the same, or agree. Source of the
cosine attack: Zhu et al., "FedMIA: An Effective Membership Inference Attack Exploiting 'All for One' Principle in
Federated Learning", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session
from torch import Tensor

from promptfed.client_service.training.data import ClientData, LocalSplit
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.backend import CannotOpen, DatabaseAway
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob
from promptfed.coordinator.store.opening import Store, open_to_look
from promptfed.coordinator.store.tables import FederationRow, PhaseRow, TaskRow, UpdateRow
from promptfed.experiments.attacks import membership
from promptfed.experiments.attacks.membership import Attack, LabelledLogits, Scores
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import method_for
from promptfed.shared.methods.core.interface.base import ClientContext, ClientInfo, Method, MethodError
from promptfed.shared.methods.core.interface.hooks import Prepares
from promptfed.shared.spec.spec import FederationSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import tensors_of

ONE_STEP = TrainingSpec(epochs=1, batch_size=1, optimizer="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0)


@dataclass(frozen=True)
class StoredPhase:
    """One closed phase: the payload of all clients, and each client's update."""

    round: int
    phase: str
    payload: Tensors
    updates: dict[str, Tensors]


@dataclass(frozen=True)
class StoredFederation:
    """The stored spec and phases of a federation."""

    spec: FederationSpec
    phases: tuple[StoredPhase, ...]


def read_stored(folder: Path, federation: str, client: str) -> StoredFederation:
    """The federation (by id or name) of a coordinator's data folder, and the phases in which ``client`` took part.

    Raises:
        CommandError: a coordinator runs on the folder, the federation or client is unknown, or no updates are kept.
    """
    with _opened(folder) as store, store.database.read() as session:
        row = session.scalars(
            select(FederationRow).where((FederationRow.id == federation) | (FederationRow.name == federation))
        ).first()
        if row is None:
            raise CommandError(f"{folder} has no federation {federation!r}", Exit.BAD_INPUT)
        try:
            spec = FederationSpec.model_validate(row.spec)
        except ValidationError as error:
            raise CommandError(
                f"the spec of {row.name} cannot be read: {error.errors()[0]['msg']}", Exit.BAD_INPUT
            ) from None
        if spec.secure_aggregation is not None:
            text = f"{row.name} has secure sums: its coordinator has never seen a single update"
            raise CommandError(f"{text}, and there is nothing to attack but the export", Exit.BAD_INPUT)
        phases = tuple(_phases(session, store.blobs, row.id, client))
        if not phases:
            text = f"{row.name} keeps no update of {client!r}"
            raise CommandError(f"{text}: is that its name, and spec.retention all?", Exit.BAD_INPUT)
        return StoredFederation(spec, phases)


@contextmanager
def _opened(folder: Path) -> Iterator[Store]:
    try:
        store = open_to_look(Settings(data_dir=folder))
    except (CannotOpen, DatabaseAway, OSError) as error:
        raise CommandError(
            f"{error}: stop the coordinator, or give a copy of its data folder", Exit.BAD_INPUT
        ) from None
    try:
        yield store
    except DamagedBlob as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    finally:
        store.close()


def _phases(session: Session, blobs: Blobs, id: str, client: str) -> Iterator[StoredPhase]:
    query = (
        select(PhaseRow.id, PhaseRow.round, PhaseRow.name, TaskRow.client, TaskRow.payload_sha256, UpdateRow.sha256)
        .join(TaskRow, TaskRow.phase_id == PhaseRow.id)
        .join(UpdateRow, UpdateRow.task_id == TaskRow.id)
        .where(PhaseRow.federation_id == id, UpdateRow.stored)
        .order_by(PhaseRow.id, TaskRow.client)
    )
    by_phase: dict[int, list[Any]] = {}
    for row in session.execute(query):
        by_phase.setdefault(row.id, []).append(row)
    for rows in by_phase.values():
        for own in (row for row in rows if row.client == client):
            updates = {row.client: tensors_of(blobs.tensors(row.sha256)[0]) for row in rows}
            payload = tensors_of(blobs.tensors(own.payload_sha256)[0])
            yield StoredPhase(own.round, own.name, payload, updates)


@dataclass(frozen=True)
class Attacker:
    """An operator who attacks one client, with the backbone and images of unknown membership."""

    stored: StoredFederation
    client: str
    backbone: Backbone
    data: ClientData

    def attacks(self, members: str, others: str, most: int, delta: float) -> list[Attack]:
        """The attacks on the client's stored updates, with at most ``most`` images of each part.

        ``loss`` and ``lira`` (see `loss_attacks`) use the last updates; the other clients are the references.
        ``cosine`` uses the cosine of every update and each image's gradient at the payload, compared with those of at
        least four other clients.

        Raises:
            CommandError: a part of the data has no images, or an update alone is not a classifier.
        """
        parts = [self._picked(part, most) for part in (members, others)]
        last = self.stored.phases[-1]
        peers = sorted(last.updates.keys() - {self.client})
        own, *references = [[self._logits(split, client) for split in parts] for client in (self.client, *peers)]
        attacks = membership.loss_attacks(own, references, delta)
        cosines = [self._cosines(split) for split in parts]
        if cosines[0] is not None and cosines[1] is not None:
            attacks.append(membership.attack("cosine", cosines[0], cosines[1], delta))
        return attacks

    def _picked(self, part: str, most: int) -> LocalSplit:
        split = self.data.split(part, self._names())
        if not len(split):
            raise CommandError(f"the data have no {part} images", Exit.BAD_INPUT)
        draws = torch.Generator().manual_seed(0)
        return picked(split, torch.randperm(len(split), generator=draws)[:most].sort().values)

    def _names(self) -> tuple[str, ...]:
        given = self.stored.spec.class_names
        return self._method().label_space(tuple(given) if given else None, self.data.class_names)

    def _method(self) -> Method:
        return method_for(self.stored.spec)

    def _logits(self, split: LocalSplit, client: str) -> LabelledLogits:
        """Logits ``(n, C)`` by a client's last update, and labels ``(n,)``."""
        last = self.stored.phases[-1]
        method, context = self._method(), self._context(last, split, TrainingSpec())
        try:
            return membership.logits_of(method.classifier(context, last.payload | last.updates[client], {}), split)
        except (MethodError, KeyError) as error:
            text = f"an update of {method.name} alone classifies nothing"
            raise CommandError(f"{text}: {error}", Exit.BAD_INPUT) from None

    def _context(self, phase: StoredPhase, split: LocalSplit, training: TrainingSpec) -> ClientContext:
        spec = self.stored.spec
        names = self._names()
        return ClientContext(
            backbone=self.backbone,
            terms=TrainingTerms.of(spec, training=training),
            class_names=names,
            template=spec.template or self.data.template,
            client=self.client,
            domain=self.data.domain,
            peers=(ClientInfo(self.client, "trainer", len(split), names, self.data.domain),),
            round=phase.round,
            phase=phase.phase,
            train=split,
            label_space=names,
        )

    def _cosines(self, split: LocalSplit) -> Scores | None:
        """Mean over the phases of Φ((s − μ)/σ) ``(n,)``, with s of the client's change and μ and σ of the others'."""
        scores = []
        for phase in self.stored.phases:
            peers = sorted(phase.updates.keys() - {self.client})
            if len(peers) < membership.LEAST_REFERENCES:
                continue
            gradients = self._gradients(phase, split)
            own, *others = [_cosine(gradients, _change(phase, client)) for client in (self.client, *peers)]
            scores.append(membership.likelihood_ratio(own, others, own_spread=math.inf))
        return np.mean(scores, axis=0) if scores else None

    def _gradients(self, phase: StoredPhase, split: LocalSplit) -> Tensor:
        """Change ``(n, d)`` of the uploaded tensors by one step at rate 1 on each image alone."""
        method, rows = self._method(), []
        base = self._context(phase, split, ONE_STEP)
        private = method.prepare(base, {}) if isinstance(method, Prepares) else {}
        for row in range(len(split)):
            context = replace(base, train=picked(split, torch.tensor([row])))
            update = method.train(context, phase.payload, private).update
            rows.append(_flat({name: update[name] - phase.payload[name] for name in _names_of(phase)}))
        return torch.stack(rows)


def picked(split: LocalSplit, rows: Tensor) -> LocalSplit:
    """The images of a split at ``rows`` (M,), in that order."""
    return LocalSplit(
        split.labels[rows],
        lambda: split.features()[rows],
        lambda some: split.images(rows[some]),
        lambda: split.raw_features()[rows],
        lambda some: split.patches(rows[some]),
    )


def _names_of(phase: StoredPhase) -> Sequence[str]:
    update = next(iter(phase.updates.values()))
    return [name for name in sorted(update) if name in phase.payload and update[name].is_floating_point()]


def _change(phase: StoredPhase, client: str) -> Tensor:
    return _flat({name: phase.updates[client][name] - phase.payload[name] for name in _names_of(phase)})


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for _, tensor in sorted(tensors.items())])


def _cosine(gradients: Tensor, change: Tensor) -> Scores:
    lengths = gradients.norm(dim=1) * change.norm()
    cosines: Scores = ((gradients @ change) / lengths.clamp_min(1e-30)).numpy()
    return cosines
