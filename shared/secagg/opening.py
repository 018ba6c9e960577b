"""What the coordinator does: check answers, tell when the sum can be opened, open it. It sees no client's vector."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from promptfed.shared.secagg import SecureError, masks, shamir
from promptfed.shared.secagg.keys import is_signed, public_of
from promptfed.shared.secagg.member import confirmed
from promptfed.shared.secagg.messages import (
    ConfirmAnswer,
    ConfirmJob,
    MaskJob,
    SharesAnswer,
    UnmaskAnswer,
    UnmaskJob,
    alive_digest,
)
from promptfed.shared.secagg.roster import Roster


def check_shares(roster: Roster, place: int, answer: SharesAnswer) -> None:
    """Raise SecureError (``bad-exchange``) where the boxes cannot be those of ``place``."""
    wanted = len(roster.neighbours(place))
    if answer.roster_sha256 != roster.sha256.hex():
        raise SecureError("wrong-roster", "the shares are for another roster")
    if len(answer.boxes) != wanted or any(len(box) != 2 * shamir.SHARE_BYTES + 16 for box in answer.boxes):
        raise SecureError("bad-exchange", f"{wanted} boxes of {2 * shamir.SHARE_BYTES + 16} bytes are expected")


def mask_job(roster: Roster, place: int, shares: Mapping[int, SharesAnswer]) -> MaskJob:
    """What step 2 tells the client at ``place``; ``shares`` by the places of those who have shared."""
    boxes = []
    for sender in roster.neighbours(place):
        if sender in shares:
            boxes.append((sender, shares[sender].boxes[roster.neighbours(sender).index(place)]))
    return MaskJob(sharing=sorted(shares), boxes=boxes)


def confirm_job(sharing: Collection[int], alive: Collection[int]) -> ConfirmJob:
    """What step 3 tells all of those whose masked vectors are there."""
    return ConfirmJob(alive=sorted(alive), dropped=sorted(set(sharing) - set(alive)))


def check_confirmation(roster: Roster, place: int, alive: Sequence[int], answer: ConfirmAnswer) -> None:
    """Raise SecureError (``bad-signature``) where the list is not signed by whoever is at ``place``."""
    digest = alive_digest([roster.hashes[one] for one in alive])
    key, signature = bytes.fromhex(roster.entries[place].identity_key), bytes.fromhex(answer.signature)
    if answer.alive_sha256 != digest or not is_signed(key, signature, "confirm", confirmed(roster, place, digest)):
        raise SecureError("bad-signature", "this is not the client's signature of the list of step confirm")


def unmask_job(roster: Roster, place: int, answers: Mapping[int, ConfirmAnswer]) -> UnmaskJob:
    """What step 4 tells the client at ``place``: the signatures of those whose keys it knows."""
    known = [one for one in roster.holders(place) if one in answers]
    return UnmaskJob(signatures=[(one, answers[one].signature) for one in known])


def check_reveal(roster: Roster, place: int, confirm: ConfirmJob, answer: UnmaskAnswer) -> None:
    """Raise SecureError (``bad-shares``) where these are not just the shares that ``place`` holds of each."""
    held = roster.holders(place)
    wanted = [[one for one in held if one in set(kind)] for kind in (confirm.alive, confirm.dropped)]
    if [[one for one, _ in given] for given in (answer.seeds, answer.keys)] != wanted:
        raise SecureError(
            "bad-shares", "these are not the shares that were asked for: own masks of those who count, keys of the rest"
        )
    for _, share in (*answer.seeds, *answer.keys):
        shamir.share_value(share)


def can_open(roster: Roster, sharing: Iterable[int], answered: Collection[int]) -> bool:
    """Whether the shares of those who ``answered`` step 4 open the secret of everybody in ``sharing``."""
    if roster.graph.neighbours is None:
        return len(answered) >= roster.graph.threshold
    there = set(answered)
    return all(len(there.intersection(roster.holders(one))) >= roster.graph.threshold for one in sharing)


def open_sum(
    roster: Roster,
    confirm: ConfirmJob,
    vectors: Iterable[masks.Words],
    reveals: Mapping[int, UnmaskAnswer],
) -> masks.Words:
    """Σ w·x modulo 2⁶⁴ of those who count: their masked ``vectors`` without the masks that do not cancel.

    Raises:
        SecureError: ``bad-shares`` where somebody's secret cannot be opened or is another than it announced.
    """
    total: masks.Words | None = None
    for vector in vectors:
        total = vector.copy() if total is None else total + vector
    if total is None:
        raise SecureError("bad-shares", "there is no masked vector")
    opener = _Opener(roster.graph.threshold)
    seeds = _by_owner((place, answer.seeds) for place, answer in reveals.items())
    for owner in confirm.alive:
        seed = opener.secret(owner, seeds.get(owner, {}))
        total -= masks.self_mask(seed, roster.sha256, len(total))
    keys = _by_owner((place, answer.keys) for place, answer in reveals.items())
    alive = set(confirm.alive)
    for owner in confirm.dropped:
        key = opener.secret(owner, keys.get(owner, {}))
        if public_of(key).hex() != roster.entries[owner].mask_key:
            raise SecureError("bad-shares", "the shares of a mask key do not make the key that was announced")
        for peer in roster.neighbours(owner):
            if peer in alive:
                # What the peer added is the negative of what the owner would have.
                other = bytes.fromhex(roster.entries[peer].mask_key)
                total += masks.pair_mask(key, other, roster.sha256, len(total))
    return total


def _by_owner(given: Iterable[tuple[int, Sequence[tuple[int, bytes]]]]) -> dict[int, dict[int, bytes]]:
    """Of each owner the shares by where their holders evaluated the polynomial, a place + 1."""
    found: dict[int, dict[int, bytes]] = {}
    for place, shares in given:
        for owner, share in shares:
            found.setdefault(owner, {})[place + 1] = share
    return found


class _Opener:
    """Opens secrets; Lagrange's factors, which many secrets have in common, are made once."""

    def __init__(self, threshold: int):
        self._threshold = threshold
        self._factors: dict[tuple[int, ...], dict[int, int]] = {}

    def secret(self, owner: int, shares: Mapping[int, bytes]) -> bytes:
        """The secret of ``owner``. Raises SecureError (``bad-shares``) where there are too few."""
        at = tuple(sorted(shares)[: self._threshold])
        if len(at) < self._threshold:
            text = f"{len(at)} shares of the secret of entry {owner} are there; {self._threshold} open it"
            raise SecureError("bad-shares", text)
        if at not in self._factors:
            self._factors[at] = shamir.factors(at)
        return shamir.combine({place: shares[place] for place in at}, self._factors[at])
