"""The messages of a secure sum: JSON with hex and base64. Clients are identified by their place in the roster."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import MOST_CLIENTS, SecureError
from promptfed.shared.secagg.keys import expect_exchange_key, is_identity, is_signed
from promptfed.shared.spec.section import ceil_fraction, left_out
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.weighting import WHOLE_WEIGHT, Weighting, whole_weights

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Place = Annotated[int, Field(ge=0, lt=1024)]
Places = Annotated[list[Place], Field(max_length=1024)]
LEAST_CLIENTS = 3
LEAST_EFFECTIVE = 2.5

MOST_OWN_SHARE = 0.5
"""What members insist on of a sum's weights where no policy says otherwise."""


def _from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError("is not base64") from None


Bytes = Annotated[
    bytes,
    BeforeValidator(_from_text),
    PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str),
    Field(max_length=200),
]
Given = Annotated[list[tuple[Place, Bytes]], Field(max_length=1024)]
"""Bytes by place."""


class SecureMessage(BaseModel):
    """Base of all messages: unknown keys are refused, and only base64 is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(SecureMessage):
    """One client's keys for one attempt. ``terms``: SHA-256 of its task.

    ``samples``: its number of training samples, from which all members compute its weight; 1 for uniform weights.
    """

    federation_id: Annotated[str, Field(max_length=100)]
    round: Annotated[int, Field(ge=0, le=100_000)]
    phase: Annotated[str, Field(max_length=100)]
    attempt: Annotated[int, Field(ge=1, le=10)]
    identity_key: Hex32
    mask_key: Hex32
    share_key: Hex32
    samples: Annotated[int, Field(ge=0, le=1 << 40)]
    payload_sha256: Digest
    terms: Hex32

    def digest(self) -> bytes:
        """SHA-256 of the entry as canonical JSON, its identifier in the roster."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).digest()


@dataclass(frozen=True)
class Limits:
    """A client's conditions. ``minimum``: clients in a sum. ``max_own_share``: its own share of a sum's weight.

    ``min_effective``: the effective number of clients in a sum, (Σ a)²/Σ a².

    ``peers``: fingerprints of members whose keys the owner has verified. If any are given, at most ``unverified`` other
    members may have a key that is not listed, and at least ``verified`` members of a sum must have a listed key.

    ``min_move``: how far a payload must be from that of an earlier sum of other members, as a part of its own change.
    """

    minimum: int = LEAST_CLIENTS
    max_own_share: float = MOST_OWN_SHARE
    peers: frozenset[str] = frozenset()
    verified: int = 0
    unverified: int = 0
    min_effective: float = LEAST_EFFECTIVE
    min_move: float = 0.1


class KeysAnswer(SecureMessage):
    """The answer of step 0: an entry, signed with its identity key.

    ``limits``: its sender's conditions where they are not the usual ones, for the coordinator alone.
    """

    entry: Entry
    signature: Hex64
    limits: Limits | None = left_out(None)


class RosterMessage(SecureMessage):
    """The input of step 1: the entries of all clients."""

    entries: Annotated[list[KeysAnswer], Field(max_length=1024)]


class SharesAnswer(SecureMessage):
    """The answer of step 1: one encrypted pair of shares for each other client, in order of place.

    ``commitments`` to the pair of each holder, including the client itself, in order of place. ``seed_sha256``: the
    commitment to the seed that the shares open (`promptfed.shared.secagg.vectors`).
    """

    roster_sha256: Hex32
    boxes: Annotated[list[Bytes], Field(max_length=1024)]
    commitments: Annotated[list[Bytes], Field(max_length=1024)]
    seed_sha256: Hex32


class MaskJob(SecureMessage):
    """The input of step 2: the clients that have shared, their boxes for this client, and their commitments."""

    sharing: Places
    boxes: Given
    commitments: Given


class ConfirmJob(SecureMessage):
    """The input of step 3: the clients that have shared, divided by whether their masked vectors count."""

    alive: Places
    dropped: Places


class ConfirmAnswer(SecureMessage):
    """The answer of step 3: a signature of the only list for which this client unmasks."""

    alive_sha256: Hex32
    signature: Hex64


class UnmaskJob(SecureMessage):
    """The input of step 4: the signatures of step 3."""

    signatures: Annotated[list[tuple[Place, Hex64]], Field(max_length=1024)]


class UnmaskAnswer(SecureMessage):
    """The answer of step 4: shares of the seeds of counted clients, and of the mask keys of the others."""

    seeds: Given
    keys: Given


def alive_digest(hashes: list[bytes]) -> str:
    """SHA-256 (hex) over the entries of the counted clients, in order."""
    return hashlib.sha256(canonical_json([digest.hex() for digest in sorted(hashes)]).encode()).hexdigest()


def effective_clients(weights: Iterable[float]) -> float:
    """As how many clients of equal weight these count: (Σ a)²/Σ a²."""
    values = list(weights)
    return sum(values) ** 2 / sum(weight**2 for weight in values)


def too_heavy(samples: Mapping[str, int], rule: Weighting) -> list[str]:
    """The clients, from the heaviest on, with whom no member would take part in a sum of all; none of two or fewer."""
    left = dict(samples)
    heavy: list[str] = []
    while len(left) >= LEAST_CLIENTS:
        weights = whole_weights(left, rule)
        heaviest = max(sorted(left), key=weights.__getitem__)
        share = weights[heaviest] / sum(weights.values())
        if share <= MOST_OWN_SHARE and effective_clients(weights.values()) >= LEAST_EFFECTIVE:
            return heavy
        heavy.append(heaviest)
        del left[heaviest]
    return heavy[:1]  # too few are left for a sum: one is named


class Roster:
    """Entries by place; places follow the order of the entries' hashes.

    ``threshold``: minimum clients in every step of an attempt, and the number of shares that open a secret.
    ``weights`` of all places; the largest is 1. Everybody computes them by ``rule`` from the members' samples.
    """

    def __init__(self, entries: Iterable[Entry], spec: SecureAggregationSpec, rule: Weighting):
        ordered = sorted((entry.digest(), entry) for entry in entries)
        self.hashes = tuple(digest for digest, _ in ordered)
        self.entries = {place: entry for place, (_, entry) in enumerate(ordered)}
        self.threshold = max(2, ceil_fraction(spec.threshold, len(ordered)))
        weights = whole_weights({place: entry.samples for place, entry in self.entries.items()}, rule)
        self.weights = [weights[place] / WHOLE_WEIGHT for place in self.entries]
        named = [[one.hex(), weights[place]] for place, one in enumerate(self.hashes)]
        self.sha256 = hashlib.sha256(canonical_json(named).encode()).digest()

    def others(self, place: int) -> list[int]:
        """All places but ``place``, in order: it shares masks and secrets with them."""
        return [other for other in self.entries if other != place]

    def place_of(self, entry: Entry) -> int:
        """The place of ``entry``. Raises SecureError (``bad-roster``) if it is not in the roster."""
        try:
            return self.hashes.index(entry.digest())
        except ValueError:
            raise SecureError("bad-roster", "this client's entry is not in the roster as it was signed") from None

    def message(self, signed: Mapping[int, KeysAnswer]) -> RosterMessage:
        """The message for each client."""
        return RosterMessage(entries=[signed[place].model_copy(update={"limits": None}) for place in self.entries])


def make_roster(
    answers: Iterable[KeysAnswer], spec: SecureAggregationSpec, rule: Weighting
) -> tuple[Roster, dict[int, KeysAnswer]]:
    """The roster of all clients that sent keys, and their answers by place; ``rule`` determines their weights."""
    ordered = sorted(answers, key=lambda answer: answer.entry.digest())
    return Roster((answer.entry for answer in ordered), spec, rule), dict(enumerate(ordered))


def read_roster(
    message: RosterMessage, own: KeysAnswer, spec: SecureAggregationSpec, minimum: int, rule: Weighting
) -> Roster:
    """Read the roster as a client: every entry must be signed for this attempt, payload and terms.

    Raises:
        SecureError: ``bad-roster`` if an entry is not.
    """
    entries = [answer.entry for answer in message.entries]
    count = len(entries)
    _expect(len({entry.digest() for entry in entries}) == count, "holds an entry twice")
    _expect(max(LEAST_CLIENTS, minimum) <= count <= MOST_CLIENTS, f"is of {count} clients")
    roster = Roster(entries, spec, rule)
    roster.place_of(own.entry)
    _expect_keys(entries)
    if rule.is_uniform:
        _expect(all(entry.samples == 1 for entry in entries), "tells samples where all weigh the same")
    for answer in message.entries:
        _expect_entry(answer, own.entry)
    return roster


def _expect_keys(entries: Iterable[Entry]) -> None:
    keys = [key for entry in entries for key in expect_keys(entry)]
    _expect(len(set(keys)) == len(keys), "holds a key twice")


def expect_keys(entry: Entry) -> tuple[str, str, str]:
    """The keys of an entry, in hex: three different ones that others can use. Raises SecureError (``bad-roster``)."""
    keys = entry.identity_key, entry.mask_key, entry.share_key
    _expect(len(set(keys)) == len(keys), f"holds a key of ed25519:{entry.identity_key} twice")
    _expect(
        is_identity(bytes.fromhex(entry.identity_key)), f"holds ed25519:{entry.identity_key}, with which all can sign"
    )
    for key in keys[1:]:
        expect_exchange_key(bytes.fromhex(key))
    return keys


def _expect_entry(answer: KeysAnswer, own: Entry) -> None:
    entry = answer.entry
    here = ("federation_id", "round", "phase", "attempt", "payload_sha256", "terms")
    other = [name for name in here if getattr(entry, name) != getattr(own, name)]
    _expect(not other, f"has an entry with another {', '.join(other)} than this client's")
    if not is_entry_signed(answer):
        raise SecureError("bad-roster", f"the entry of ed25519:{entry.identity_key} is not signed by it")


def is_entry_signed(answer: KeysAnswer) -> bool:
    """Whether an entry is signed with its identity key."""
    entry = answer.entry
    body = entry.model_dump(mode="json")
    return is_signed(bytes.fromhex(entry.identity_key), bytes.fromhex(answer.signature), "keys", body)


def _expect(holds: bool, fault: str) -> None:
    if not holds:
        raise SecureError("bad-roster", f"the roster {fault}")
