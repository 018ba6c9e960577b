"""Facts of an export's card, from the database and the stored state, and checks of a card against them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.clients.views import client_view
from promptfed.coordinator.resources.federations.views import federation_view
from promptfed.coordinator.resources.results.rounds import round_report, rounds, state_of
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.api.api_schemas import ClientView, FederationView
from promptfed.shared.api.export_card import (
    BACKBONE_CONFIG,
    BACKBONE_WEIGHTS,
    GIVEN_NAMES,
    LISTED,
    MARKDOWN_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    Card,
    CardFile,
    Facts,
    Hashes,
    Tally,
    TensorShape,
    classes_of,
    facts_of,
    spec_hash,
)
from promptfed.shared.canonical import parse_json
from promptfed.shared.methods import METHODS
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Arrays, decode_place, encode, method_part, state_hash

SHOWN = 200  # letters of a value that a refusal names
Differences = dict[str, str]  # explanations by place in the card


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
        begun = (number for number in rounds(session, federation.id) if number <= round)
        tally = Tally(round_report(session, federation, number) for number in begun)
    place = registry.blobs.place(stored.sha256)
    whole, _ = decode_place(place)
    state = method_part(whole)
    file = _described(state)
    if len(state) == len(whole):  # exported byte for byte
        size = len(place) if isinstance(place, bytes) else place.stat().st_size
        file = file.model_copy(update={"bytes": size, "sha256": stored.sha256.removeprefix("sha256:")})
    return Known(view, clients, tally, round, state_hash(state), file)


def _described(tensors: Arrays) -> CardFile:
    body = encode(tensors)
    shapes = {
        name: TensorShape(shape=list(tensor.shape), dtype=tensor.dtype.name) for name, tensor in sorted(tensors.items())
    }
    return CardFile(bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tensors=shapes)


def check_card(registry: Registry, federation: Federation, round: int, body: bytes) -> None:
    """Compare ``body``, the bytes of a ``card.json``, with the coordinator's data on the result after ``round``.

    A coordinator without a backbone cannot compute the class weights, the merged model, the backbone's files and
    ``card.md``: their digests are not checked, nor are class names that who exported it has given.

    Raises:
        UnreadableBody: it is not JSON.
        InvalidRequest: it is not a card.
        NoState: there is no state of that round, or it is no longer kept.
        ExportDiffers: the card differs from the coordinator's data.
    """
    card = _parsed(body)
    known = known_of(registry, federation, round)
    differences = _differences(card, known) | _wrong_classes(card, known) | _wrong_files(card, known)
    if differences:
        errors = [{"path": path, "detail": detail} for path, detail in differences.items()]
        text = "; ".join(f"{error['path']}: {error['detail']}" for error in errors[:5])
        raise problems.ExportDiffers(f"the card is not what this coordinator knows: {text}", errors=errors)


def _parsed(body: bytes) -> Card:
    try:
        return Card.model_validate(parse_json(body), extra="forbid")
    except ValidationError as error:
        offences = SpecError.from_validation(error)
        raise problems.InvalidRequest(str(offences), errors=offences.errors) from None
    except ValueError as error:
        raise problems.UnreadableBody(f"the card cannot be read: {error}") from None


def _differences(card: Card, known: Known) -> Differences:
    named, numbered = known.facts(), known.facts(anonymous=True)
    facts = numbered if card.participants == numbered.participants else named
    told = {name: (getattr(card, name), getattr(facts, name)) for name in Facts.model_fields}
    return {
        name: f"it is {_short(ours)}, not {_short(theirs)}" for name, (theirs, ours) in told.items() if theirs != ours
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _wrong_classes(card: Card, known: Known) -> Differences:
    names, source, (own, whose) = card.class_names, card.class_names_from, classes_of(known.view)
    if names is None:
        text = None if own is None and source is None else f"{whose} named classes"
    elif len(set(names)) < len(names) or not names:
        text = "each class has a name of its own"
    elif source == GIVEN_NAMES:
        text = None
    elif source != whose:
        text = f"class_names_from is {GIVEN_NAMES!r}" + (f" or {whose!r}" if whose is not None else "")
    else:
        text = None if names == own else f"{whose} named {_short(own)}"
    return {"class_names": text} if text is not None else {}


def _wrong_files(card: Card, known: Known) -> Differences:
    wrong: Differences = {}
    files = card.files
    for name in sorted(files.keys() - LISTED):
        wrong[f"files.{name[:SHOWN]}"] = f"an export holds no such file; it may hold {', '.join(sorted(LISTED))}"
    for name in sorted({STATE_FILE, MARKDOWN_FILE} - files.keys()):
        wrong[f"files.{name}"] = "an export has this file, and its card names it"
    if STATE_FILE in files and not _is_same(files[STATE_FILE], known.state):
        wrong[f"files.{STATE_FILE}"] = f"the state's file is {_short(known.state)}"
    if (BACKBONE_CONFIG in files) != (BACKBONE_WEIGHTS in files):
        wrong["files"] = "a backbone is its configuration and its weights together"
    if card.use.open_clip != (WEIGHTS_FILE in files):
        wrong["use.open_clip"] = f"it is true where there is {WEIGHTS_FILE}, and only there"
    if card.signature is not None:
        wrong["signature"] = "a card holds no signature: it lies in a file beside it"
    return wrong


def _is_same(given: CardFile, known: CardFile) -> bool:
    """Whether a file is the known one. The shapes of its tensors may be left out."""
    shapes = known.tensors if given.tensors is not None else None
    return given == known.model_copy(update={"tensors": shapes})
