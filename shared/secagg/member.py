"""A client's part of each step, as functions of its stored state. Results are stored before they are sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from promptfed.shared.secagg import SecureError, messages
from promptfed.shared.secagg.keys import (
    agree,
    derive,
    fingerprint,
    is_signed,
    new_pair,
    public_identity,
    public_of,
    sign,
)
from promptfed.shared.secagg.masks import Words, masked
from promptfed.shared.secagg.shares import SHARE_BYTES, Pair, commitment, expect_share, seed_digest, split

NONCE = bytes(12)  # each key encrypts only one box


@dataclass(frozen=True)
class Secrets:
    """One client's secrets of one attempt, 32 bytes each. ``share_key`` is never shared; ``identity`` is permanent."""

    identity: bytes
    mask_key: bytes
    share_key: bytes
    seed: bytes

    @classmethod
    def fresh(cls, identity: bytes) -> Secrets:
        """New secrets from the operating system's randomness."""
        return cls(identity, new_pair(), new_pair(), secrets.token_bytes(32))


def signed_entry(own: Secrets, about: Mapping[str, object]) -> messages.KeysAnswer:
    """Step 0: the signed entry with the client's public keys (`Entry`)."""
    entry = messages.Entry.model_validate(
        {
            **about,
            "identity_key": public_identity(own.identity).hex(),
            "mask_key": public_of(own.mask_key).hex(),
            "share_key": public_of(own.share_key).hex(),
        }
    )
    return messages.KeysAnswer(entry=entry, signature=sign(own.identity, "keys", entry.model_dump(mode="json")).hex())


def expect_roster(roster: messages.Roster, place: int, limits: messages.Limits) -> None:
    """Check, before any secret is shared, that members with unverified keys are too few to open a single change.

    Let n be the number of clients, t the threshold and c the number of invented clients. The invented clients can get
    two lists of counted clients signed if the n - c honest clients split into two groups that each reach t with them,
    that is if n - c + 2c >= 2t. Hence c <= 2t - n - 1 is required.

    Raises:
        SecureError: ``policy-peers`` if too many members have other keys.
    """
    if not limits.peers:
        return
    others = len(roster.hashes) - 1
    unlisted = others - _listed(roster, set(range(len(roster.hashes))) - {place}, limits)
    safe = 2 * roster.threshold - len(roster.hashes) - 1
    if unlisted > safe:
        text = f"{unlisted} of the {others} other members are not among this site's peers; with more than {safe}"
        raise SecureError("policy-peers", f"{text} the operator could open a single change: list their fingerprints")
    if unlisted > limits.unverified:
        text = f"{unlisted} of the {others} other members are not among this site's peers; {limits.unverified} may be"
        raise SecureError("policy-peers", f"{text} (secure_aggregation.unverified)")


def _listed(roster: messages.Roster, places: set[int], limits: messages.Limits) -> int:
    """The number of ``places`` whose fingerprint is in the site's policy."""
    entries = (roster.entries[place] for place in places)
    return sum(fingerprint(bytes.fromhex(entry.identity_key)) in limits.peers for entry in entries)


def share_secrets(own: Secrets, roster: messages.Roster, place: int) -> tuple[messages.SharesAnswer, Pair]:
    """Step 1: encrypted shares of the seed and the mask key for each other client, and the client's own two shares."""
    at = [holder + 1 for holder in roster.entries]
    seeds = split(own.seed, roster.threshold, at)
    keys = split(own.mask_key, roster.threshold, at)
    pairs = {to: (seeds[to + 1], keys[to + 1]) for to in roster.entries}
    answer = messages.SharesAnswer(
        roster_sha256=roster.sha256.hex(),
        boxes=[_box(own, roster, place, to, b"".join(pair)) for to, pair in pairs.items() if to != place],
        commitments=[commitment(roster.sha256, place, to, pair) for to, pair in pairs.items()],
        seed_sha256=seed_digest(roster.sha256, own.seed),
    )
    return answer, pairs[place]


def _box(own: Secrets, roster: messages.Roster, sender: int, recipient: int, content: bytes) -> bytes:
    peer = bytes.fromhex(roster.entries[recipient].share_key)
    key = derive(agree(own.share_key, peer), "share", roster.sha256, public_of(own.share_key), peer)
    return ChaCha20Poly1305(key).encrypt(NONCE, content, _about(roster, sender, recipient))


def _about(roster: messages.Roster, sender: int, recipient: int) -> bytes:
    return roster.sha256 + roster.hashes[sender] + roster.hashes[recipient]


def open_boxes(
    own: Secrets, roster: messages.Roster, place: int, job: messages.MaskJob, limits: messages.Limits
) -> dict[int, Pair]:
    """Step 2, receiving: a pair of shares from each other client that has shared.

    Raises:
        SecureError: ``bad-roster`` if too few clients or unknown clients have shared; ``bad-shares`` if a box does not
            open, or its shares do not match the sender's commitments.
    """
    sharing = expect_set(roster, job.sharing, place, limits)
    senders = [other for other in roster.others(place) if other in sharing]
    if any([sender for sender, _ in received] != senders for received in (job.boxes, job.commitments)):
        raise SecureError("bad-shares", "the boxes are not exactly those of the others that have shared")
    committed = dict(job.commitments)
    pairs, false = dict[int, Pair](), list[str]()
    for sender, box in job.boxes:
        try:
            pairs[sender] = _open(own, roster, sender, place, box, committed[sender])
        except SecureError as error:
            false.append(str(error))
    if false:
        raise SecureError("bad-shares", "; ".join(false))
    return pairs


def _open(own: Secrets, roster: messages.Roster, sender: int, recipient: int, box: bytes, committed: bytes) -> Pair:
    peer = bytes.fromhex(roster.entries[sender].share_key)
    key = derive(agree(own.share_key, peer), "share", roster.sha256, peer, public_of(own.share_key))
    try:
        content = ChaCha20Poly1305(key).decrypt(NONCE, box, _about(roster, sender, recipient))
    except (InvalidTag, ValueError):
        content = b""
    who = f"ed25519:{roster.entries[sender].identity_key}"
    if len(content) != 2 * SHARE_BYTES:
        raise SecureError("bad-shares", f"the shares of {who} are not what it encrypted to this client")
    pair = content[:SHARE_BYTES], content[SHARE_BYTES:]
    try:
        for kind, share in enumerate(pair):
            expect_share(roster.sha256, sender, recipient, kind, share, committed)
    except SecureError as error:
        raise SecureError("bad-shares", f"{who} has dealt false shares: {error}") from None
    return pair


def mask_vector(own: Secrets, roster: messages.Roster, place: int, sharing: Sequence[int], vector: Words) -> Words:
    """Step 2, sending: ``vector`` plus the self mask and the pair masks with all others that have shared."""
    peers = [other for other in roster.others(place) if other in set(sharing)]
    keys = [bytes.fromhex(roster.entries[other].mask_key) for other in peers]
    return masked(vector, own.seed, own.mask_key, keys, roster.sha256)


def expect_set(roster: messages.Roster, places: Sequence[int], place: int, limits: messages.Limits) -> set[int]:
    """Check the set of clients in a sum, which must include this client, and return it.

    Raises:
        SecureError: ``bad-roster`` if the set is invalid. ``policy-minimum``: too few clients. ``policy-share``: mostly
            this client. ``policy-effective``: mostly a few. ``policy-peers``: too few clients with verified keys.
    """
    chosen = set(places)
    if list(places) != sorted(chosen) or not chosen <= set(range(len(roster.hashes))) or place not in chosen:
        raise SecureError("bad-roster", "the list is not one of this roster's clients, with this one among them")
    least = max(messages.LEAST_CLIENTS, limits.minimum, roster.threshold)
    if len(chosen) < least:
        raise SecureError("policy-minimum", f"the sum would be over {len(chosen)} clients; {least} are the least")
    weights = {member: roster.weights[member] for member in chosen}
    total = sum(weights.values())
    share = weights[place] / total
    if share > limits.max_own_share:
        text = f"this client's own part of the sum would be {share:.3f}; {limits.max_own_share:g} is the most"
        raise SecureError("policy-share", f"{text}: take aggregation.weighting uniform, or a max_weight_share")
    effective = messages.effective_clients(weights.values())
    if effective < limits.min_effective:
        text = f"the sum would count as one of {effective:.2f} clients of equal weight; {limits.min_effective:g} are"
        raise SecureError("policy-effective", f"{text} the least: take aggregation.weighting uniform")
    listed = _listed(roster, chosen - {place}, limits)
    if listed < limits.verified:
        text = f"{listed} of the sum's other members are among this site's peers; {limits.verified} have to be"
        raise SecureError("policy-peers", f"{text} (secure_aggregation.verified)")
    return chosen


def confirm_list(
    own: Secrets,
    roster: messages.Roster,
    place: int,
    sharing: Sequence[int],
    job: messages.ConfirmJob,
    limits: messages.Limits,
) -> messages.ConfirmAnswer:
    """Step 3: the signature of the list of clients whose vectors count.

    Raises:
        SecureError: as `expect_set`, and ``bad-roster`` if both lists together are not the set used for masking.
    """
    if set(job.alive) & set(job.dropped) or {*job.alive, *job.dropped} != set(sharing):
        raise SecureError(
            "bad-roster", "who counts and who does not are together not those whom this client masked with"
        )
    expect_set(roster, job.alive, place, limits)
    digest = messages.alive_digest([roster.hashes[member] for member in job.alive])
    signature = sign(own.identity, "confirm", confirmed(roster, place, digest))
    return messages.ConfirmAnswer(alive_sha256=digest, signature=signature.hex())


def confirmed(roster: messages.Roster, place: int, alive_sha256: str) -> dict[str, object]:
    """The document that a confirmation signs."""
    entry = roster.entries[place]
    where = {"federation_id": entry.federation_id, "round": entry.round, "phase": entry.phase, "attempt": entry.attempt}
    return {**where, "roster_sha256": roster.sha256.hex(), "alive_sha256": alive_sha256}


def reveal_shares(
    roster: messages.Roster, place: int, confirm: messages.ConfirmJob, held: Mapping[int, Pair], job: messages.UnmaskJob
) -> messages.UnmaskAnswer:
    """Step 4: from ``held`` (own place included) seed shares of counted clients and mask key shares of the others.

    Raises:
        SecureError: ``bad-roster`` if fewer clients than the threshold have signed this client's list.
    """
    digest = messages.alive_digest([roster.hashes[member] for member in confirm.alive])
    signers = [signer for signer, signature in job.signatures if _has_signed(roster, place, signer, digest, signature)]
    if len(signers) < len(job.signatures) or len(set(signers)) < len(signers) or len(signers) < roster.threshold:
        text = f"{len(set(signers))} of {len(job.signatures)} signatures are of this client's own list"
        raise SecureError("bad-roster", f"{text}; {roster.threshold} are needed")
    alive, dropped = set(confirm.alive), set(confirm.dropped)
    assert not alive & dropped, "nobody's seed and mask key are both told"
    return messages.UnmaskAnswer(
        seeds=[(owner, held[owner][0]) for owner in sorted(held) if owner in alive],
        keys=[(owner, held[owner][1]) for owner in sorted(held) if owner in dropped],
    )


def _has_signed(roster: messages.Roster, place: int, signer: int, digest: str, signature: str) -> bool:
    entry = roster.entries.get(signer)
    if entry is None:
        return False
    body = confirmed(roster, place, digest)
    return is_signed(bytes.fromhex(entry.identity_key), bytes.fromhex(signature), "confirm", body)
