"""The roster of an attempt: its entries, the neighbours of each client, and the checks of the entries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.encoding import MOST_CLIENTS
from promptfed.shared.secagg.graph import Graph, graph_of, ring_order
from promptfed.shared.secagg.keys import is_signed
from promptfed.shared.secagg.messages import Entry, KeysAnswer, RosterMessage
from promptfed.shared.spec.spec_aggregation import SecureAggregationSpec
from promptfed.shared.spec.weighting import WHOLE_WEIGHT, Weighting, whole_weights

LEAST_CLIENTS = 3


class Roster:
    """Entries by place; places follow the order of the entries' hashes. ``entries`` may hold only some of the places.

    ``weights`` of all places; the largest is 1. Everybody computes them by ``rule`` from the members' samples.
    """

    def __init__(self, hashes: Sequence[bytes], entries: Mapping[int, Entry], graph: Graph, rule: Weighting):
        self.hashes = tuple(hashes)
        self.entries = dict(entries)
        self.graph = graph
        places = range(len(self.hashes))
        samples = {place: self.entries[place].samples if place in self.entries else 1 for place in places}
        weights = whole_weights(samples, rule)
        self.weights = [weights[place] / WHOLE_WEIGHT for place in places]
        named = [[one.hex(), weights[place]] for place, one in enumerate(self.hashes)]
        self.sha256 = hashlib.sha256(canonical_json(named).encode()).digest()

    @cached_property
    def _ring(self) -> tuple[list[int], dict[int, int]]:
        order = ring_order(self.sha256, self.hashes)
        return order, {place: position for position, place in enumerate(order)}

    def neighbours(self, place: int) -> list[int]:
        """The places with which ``place`` shares masks and secrets, in order, without itself."""
        if self.graph.neighbours is None:
            return [other for other in range(len(self.hashes)) if other != place]
        order, position = self._ring
        return sorted(order[at] for at in self.graph.beside(position[place]))

    def holders(self, place: int) -> list[int]:
        """The places that hold shares of the secrets of ``place``: its neighbours, and itself."""
        return sorted([*self.neighbours(place), place])

    def place_of(self, entry: Entry) -> int:
        """The place of ``entry``. Raises SecureError (``bad-roster``) if it is not in the roster."""
        try:
            return self.hashes.index(entry.digest())
        except ValueError:
            raise SecureError("bad-roster", "this client's entry is not in the roster as it was signed") from None

    def message(self, signed: Mapping[int, KeysAnswer], place: int) -> RosterMessage:
        """The message for the client at ``place``."""
        if self.graph.neighbours is None:
            return RosterMessage(entries=[signed[other] for other in range(len(self.hashes))])
        return RosterMessage(
            entries=[signed[other] for other in self.holders(place)], hashes=[digest.hex() for digest in self.hashes]
        )


def make_roster(
    answers: Iterable[KeysAnswer], spec: SecureAggregationSpec, rule: Weighting
) -> tuple[Roster, dict[int, KeysAnswer]]:
    """The roster of all clients that sent keys, and their answers by place; ``rule`` determines their weights."""
    ordered = sorted(answers, key=lambda answer: answer.entry.digest())
    entries = {place: answer.entry for place, answer in enumerate(ordered)}
    graph = graph_of(spec, len(ordered), rule.is_uniform)
    return Roster([entry.digest() for entry in entries.values()], entries, graph, rule), dict(enumerate(ordered))


def read_roster(
    message: RosterMessage, own: KeysAnswer, spec: SecureAggregationSpec, minimum: int, rule: Weighting
) -> Roster:
    """Read the roster as a client: every entry it uses must be signed for this attempt, payload and terms.

    Raises:
        SecureError: ``bad-roster`` if an entry is not.
    """
    signed = sorted((answer.entry.digest(), answer) for answer in message.entries)  # digests differ: see below
    digests = [digest for digest, _ in signed]
    hashes = digests if message.hashes is None else [bytes.fromhex(digest) for digest in message.hashes]
    _expect(len(set(hashes)) == len(hashes) and hashes == sorted(hashes), "names somebody twice, or out of order")
    _expect(len(set(digests)) == len(digests), "holds an entry twice")
    _expect(max(LEAST_CLIENTS, minimum) <= len(hashes) <= MOST_CLIENTS, f"is of {len(hashes)} clients")
    place_of = {digest: place for place, digest in enumerate(hashes)}
    _expect(all(digest in place_of for digest in digests), "holds entries that it does not name")
    graph = graph_of(spec, len(hashes), message.hashes is not None)
    _expect((graph.neighbours is None) == (message.hashes is None), "has another graph than the federation's terms say")
    entries = {place_of[digest]: answer.entry for digest, answer in signed}
    roster = Roster(hashes, entries, graph, rule)
    place = roster.place_of(own.entry)
    _expect(sorted(entries) == roster.holders(place), "does not hold just the entries that this client needs")
    _expect_keys(entries.values())
    if rule.is_uniform or graph.neighbours is not None:
        _expect(rule.is_uniform, "has weights in a sparse graph")
        _expect(all(entry.samples == 1 for entry in entries.values()), "tells samples where all weigh the same")
    for _, answer in signed:
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
