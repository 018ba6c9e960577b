"""The roster of an attempt: its entries, their weights, and the checks of the entries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.encoding import MOST_CLIENTS
from promptfed.shared.secagg.keys import is_signed
from promptfed.shared.secagg.messages import Entry, KeysAnswer, RosterMessage
from promptfed.shared.spec.spec_aggregation import SecureAggregationSpec
from promptfed.shared.spec.spec_section import ceil_fraction
from promptfed.shared.spec.weighting import WHOLE_WEIGHT, Weighting, whole_weights

LEAST_CLIENTS = 3


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
        return RosterMessage(entries=[signed[place] for place in self.entries])


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
    keys = [key for entry in entries for key in (entry.identity_key, entry.mask_key, entry.share_key)]
    _expect(len(set(keys)) == len(keys), "holds a key twice")


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
