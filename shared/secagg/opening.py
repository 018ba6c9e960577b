"""The coordinator's part: check answers, decide when the sum can be opened, open it. It sees no client's vector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, islice

from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.keys import is_signed, public_of
from promptfed.shared.secagg.masks import Words, pair_mask, self_mask
from promptfed.shared.secagg.member import confirmed, expect_roster, expect_set
from promptfed.shared.secagg.messages import (
    LEAST_CLIENTS,
    ConfirmAnswer,
    ConfirmJob,
    KeysAnswer,
    Limits,
    MaskJob,
    Roster,
    SharesAnswer,
    UnmaskAnswer,
    UnmaskJob,
    alive_digest,
)
from promptfed.shared.secagg.shares import COMMITMENT_BYTES, SHARE_BYTES, combine, expect_share, factors, seed_digest
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.weighting import Weighting, whole_weights

MOST_SUBSETS = 100  # subsets of the shares of one secret that are tried if their owner dealt false ones


def unfit(answers: Mapping[str, KeysAnswer], spec: SecureAggregationSpec, rule: Weighting) -> dict[str, SecureError]:
    """Who is left out so that all others take part in the sum of those who remain, each with the reason.

    A member goes whose own conditions the sum breaks. If it breaks those of most for one member's sake, the heaviest or
    the one that fewest list, that one goes.
    """
    left, out = dict(answers), dict[str, SecureError]()
    while len(left) >= LEAST_CLIENTS and (against := _against(left, spec, rule)):
        for kind in ("policy-effective", "policy-peers"):
            reasons = [error for error in against.values() if error.kind == kind]
            if 2 * len(reasons) > len(left) and (one := _cause(left, kind, rule)) is not None:
                reported = "too-heavy" if kind == "policy-effective" else kind
                against = {one: SecureError(reported, f"most other members would refuse a sum with it: {reasons[0]}")}
        out |= against
        left = {name: answer for name, answer in left.items() if name not in against}
    return out


def _against(answers: Mapping[str, KeysAnswer], spec: SecureAggregationSpec, rule: Weighting) -> dict[str, SecureError]:
    """Who would refuse a sum of all, and why."""
    roster, against = Roster((answer.entry for answer in answers.values()), spec, rule), dict[str, SecureError]()
    content = set[tuple[Limits, float]]()  # who lists no peers and weighs as much is content too
    for name, answer in answers.items():
        place, limits = roster.place_of(answer.entry), answer.limits or Limits()
        alike = limits, roster.weights[place]
        if alike in content:
            continue
        try:
            expect_roster(roster, place, limits)
            expect_set(roster, list(roster.entries), place, limits)
        except SecureError as error:
            against[name] = error
        else:
            content |= set() if limits.peers else {alike}
    return against


def _cause(answers: Mapping[str, KeysAnswer], kind: str, rule: Weighting) -> str | None:
    """The member without whom others' conditions are met rather; None if all are alike."""
    if kind == "policy-effective":
        count = whole_weights({name: answer.entry.samples for name, answer in answers.items()}, rule)
        heaviest = max(sorted(count), key=count.__getitem__)
        return heaviest if count[heaviest] > min(count.values()) else None
    peers = [answer.limits.peers for answer in answers.values() if answer.limits and answer.limits.peers]
    listed = {name: sum(f"ed25519:{one.entry.identity_key}" in ids for ids in peers) for name, one in answers.items()}
    fewest = min(sorted(listed), key=listed.__getitem__)
    return fewest if listed[fewest] < max(listed.values()) else None


def check_shares(roster: Roster, place: int, answer: SharesAnswer) -> None:
    """Raise SecureError (``bad-exchange``) if the boxes cannot come from ``place``."""
    others = len(roster.others(place))
    if answer.roster_sha256 != roster.sha256.hex():
        raise SecureError("wrong-roster", "the shares are for another roster")
    if len(answer.boxes) != others or any(len(box) != 2 * SHARE_BYTES + 16 for box in answer.boxes):
        raise SecureError("bad-exchange", f"{others} boxes of {2 * SHARE_BYTES + 16} bytes are expected")
    if len(answer.commitments) != others + 1 or any(len(one) != COMMITMENT_BYTES for one in answer.commitments):
        raise SecureError("bad-exchange", f"{others + 1} commitments of {COMMITMENT_BYTES} bytes are expected")


def mask_job(roster: Roster, place: int, shares: Mapping[int, SharesAnswer]) -> MaskJob:
    """The input of step 2 for the client at ``place``; ``shares`` by the places of the clients that have shared."""
    senders = [sender for sender in roster.others(place) if sender in shares]
    boxes = [(sender, shares[sender].boxes[roster.others(sender).index(place)]) for sender in senders]
    commitments = [(sender, _committed(roster, sender, place, shares)) for sender in senders]
    return MaskJob(sharing=sorted(shares), boxes=boxes, commitments=commitments)


def _committed(roster: Roster, owner: int, holder: int, shares: Mapping[int, SharesAnswer]) -> bytes:
    """The commitment of ``owner`` to the shares of ``holder``."""
    return shares[owner].commitments[holder]


def confirm_job(sharing: Collection[int], alive: Collection[int]) -> ConfirmJob:
    """The input of step 3 for all clients whose masked vectors have arrived."""
    return ConfirmJob(alive=sorted(alive), dropped=sorted(set(sharing) - set(alive)))


def check_confirmation(roster: Roster, place: int, alive: Sequence[int], answer: ConfirmAnswer) -> None:
    """Raise SecureError (``bad-signature``) if the list is not signed by the client at ``place``."""
    digest = alive_digest([roster.hashes[member] for member in alive])
    key, signature = bytes.fromhex(roster.entries[place].identity_key), bytes.fromhex(answer.signature)
    if answer.alive_sha256 != digest or not is_signed(key, signature, "confirm", confirmed(roster, place, digest)):
        raise SecureError("bad-signature", "this is not the client's signature of the list of step confirm")


def unmask_job(answers: Mapping[int, ConfirmAnswer]) -> UnmaskJob:
    """The input of step 4: the signatures of step 3."""
    return UnmaskJob(signatures=[(signer, answers[signer].signature) for signer in sorted(answers)])


def check_reveal(
    roster: Roster, place: int, confirm: ConfirmJob, answer: UnmaskAnswer, shares: Mapping[int, SharesAnswer]
) -> None:
    """Raise SecureError (``bad-shares``) if these are not exactly the requested shares that ``place`` received."""
    expected = [sorted(kind) for kind in (confirm.alive, confirm.dropped)]
    if [[owner for owner, _ in sent] for sent in (answer.seeds, answer.keys)] != expected:
        raise SecureError(
            "bad-shares", "these are not the shares that were asked for: own masks of those who count, keys of the rest"
        )
    for kind, sent in enumerate((answer.seeds, answer.keys)):
        for owner, share in sent:
            expect_share(roster.sha256, owner, place, kind, share, _committed(roster, owner, place, shares))


def open_sum(
    roster: Roster,
    confirm: ConfirmJob,
    vectors: Iterable[Words],
    reveals: Mapping[int, UnmaskAnswer],
    shares: Mapping[int, SharesAnswer],
) -> Words:
    """Σ x modulo 2⁶⁴ of the counted clients: their masked ``vectors`` minus the masks that do not cancel.

    ``reveals`` have passed `check_reveal`. If they do not open a secret, its owner dealt false shares.

    Raises:
        SecureError: ``bad-shares`` if a secret cannot be opened or does not match its commitment.
    """
    total: Words | None = None
    for vector in vectors:
        total = vector.copy() if total is None else total + vector
    if total is None:
        raise SecureError("bad-shares", "there is no masked vector")
    opener = _Opener(roster)
    seeds = _by_owner((place, answer.seeds) for place, answer in reveals.items())
    for owner in confirm.alive:
        seed = opener.secret(owner, seeds.get(owner, {}), opener.seed_digest, shares[owner].seed_sha256)
        total -= self_mask(seed, roster.sha256, len(total))
    keys = _by_owner((place, answer.keys) for place, answer in reveals.items())
    alive = set(confirm.alive)
    for owner in confirm.dropped:
        key = opener.secret(owner, keys.get(owner, {}), opener.key_digest, roster.entries[owner].mask_key)
        for peer in roster.others(owner):
            if peer in alive:
                # The peer added the negative of the owner's mask.
                other = bytes.fromhex(roster.entries[peer].mask_key)
                total += pair_mask(key, other, roster.sha256, len(total))
    return total


def _by_owner(given: Iterable[tuple[int, Sequence[tuple[int, bytes]]]]) -> dict[int, dict[int, bytes]]:
    """The shares of each owner by the point at which the polynomial was evaluated: the holder's place + 1."""
    by_owner: dict[int, dict[int, bytes]] = {}
    for place, shares in given:
        for owner, share in shares:
            by_owner.setdefault(owner, {})[place + 1] = share
    return by_owner


class _Opener:
    """Opens secrets. The Lagrange factors, which many secrets share, are computed once."""

    def __init__(self, roster: Roster):
        self._roster, self._threshold = roster, roster.threshold
        self._factors: dict[tuple[int, ...], dict[int, int]] = {}

    def seed_digest(self, seed: bytes) -> str:
        """The commitment to a seed."""
        return seed_digest(self._roster.sha256, seed)

    def key_digest(self, key: bytes) -> str:
        """The commitment to a private mask key: its public key."""
        return public_of(key).hex()

    def secret(self, owner: int, shares: Mapping[int, bytes], digest: Callable[[bytes], str], announced: str) -> bytes:
        """The secret of ``owner`` whose ``digest`` is ``announced``; several subsets of the shares are tried.

        Raises:
            SecureError: ``bad-shares`` if there are too few shares, or none of `MOST_SUBSETS` subsets opens the secret.
        """
        if len(shares) < self._threshold:
            text = f"{len(shares)} shares of the secret of entry {owner} are there; {self._threshold} open it"
            raise SecureError("bad-shares", text)
        for at in islice(combinations(sorted(shares), self._threshold), MOST_SUBSETS):
            if at not in self._factors:
                self._factors[at] = factors(at)
            try:
                secret = combine({place: shares[place] for place in at}, self._factors[at])
            except SecureError:
                continue
            if digest(secret) == announced:
                return secret
        who = f"ed25519:{self._roster.entries[owner].identity_key}"
        raise SecureError("bad-shares", f"the shares that {who} has dealt do not open what it announced: withdraw it")
