"""Facts of an export's card, from the database and the stored state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.reports.federations import client_view, federation_view
from promptfed.coordinator.reports.rounds import round_report, rounds, state_of
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.api.api_schemas import ClientView, FederationView
from promptfed.shared.api.export_card import CardFile, Facts, Hashes, Tally, TensorShape, facts_of, spec_hash
from promptfed.shared.methods import METHODS
from promptfed.shared.tensors import Tensors, decode_place, encode, method_part, state_hash


@dataclass(frozen=True)
class Known:
    """The coordinator's data on the result after ``round``; ``state``: its file in an export."""

    view: FederationView
    clients: list[ClientView]
    tally: Tally
    round: int
    state_hash: str
    state: CardFile

    def facts(self, anonymous: bool = False) -> Facts:
        """The facts of its card."""
        spec = self.view.model_dump(mode="json")["spec"]
        hashes = Hashes(state=self.state_hash, backbone=self.view.backbone.fingerprint, spec=spec_hash(spec))
        method = METHODS[self.view.spec.method["name"]]
        about = method.summary, method.paper
        return facts_of(self.view, self.clients, self.tally, hashes, about, self.round, anonymous)


def known_of(registry: Registry, federation: Federation, round: int) -> Known:
    """The coordinator's data on the result after ``round``. Raises NoState."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        stored = state_of(session, federation, round)
        view = federation_view(session, federation)
        clients = [client_view(row) for row in session.scalars(queries.clients(federation.id).order_by(ClientRow.name))]
        numbers = [number for number in rounds(session, federation.id) if number <= round]
    tally = Tally()
    for number in numbers:
        with registry.database.read() as session:
            tally.add(round_report(session, federation, number))
    place = registry.blobs.place(stored.sha256)
    whole, _ = decode_place(place)
    state = method_part(whole)
    file = _described(state)
    if len(state) == len(whole):  # exported byte for byte
        size = len(place) if isinstance(place, bytes) else place.stat().st_size
        file = file.model_copy(update={"bytes": size, "sha256": stored.sha256.removeprefix("sha256:")})
    return Known(view, clients, tally, round, state_hash(state), file)


def _described(tensors: Tensors) -> CardFile:
    body = encode(tensors)
    shapes = {
        name: TensorShape(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(tensors.items())
    }
    return CardFile(bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tensors=shapes)
