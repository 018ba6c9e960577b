"""Commitments: a dealer of shares publishes hashes of all shares and of the secret that they open.

Shares and seeds are uniform numbers of 256 bits. Their hashes therefore reveal nothing, and nobody can find another
share with the same hash. A holder checks its shares on receipt. The coordinator checks them when they are returned,
which identifies the sender of a false share, and it checks every opened seed.
"""

from __future__ import annotations

import hashlib

from promptfed.shared.secagg import SecureError, shamir

HASH_BYTES = 32
COMMITMENT_BYTES = 2 * HASH_BYTES

Pair = tuple[bytes, bytes]
"""A share of somebody's own mask's seed, and one of its private mask key."""


def seed_digest(roster_sha256: bytes, seed: bytes) -> str:
    """The commitment to a seed itself, in hex."""
    return hashlib.sha256(b"promptfed/seed/1\0" + roster_sha256 + seed).hexdigest()


def commitment(roster_sha256: bytes, owner: int, holder: int, pair: Pair) -> bytes:
    """64 bytes: one hash for each of the two shares that the member at place ``owner`` deals to ``holder``."""
    return b"".join(_share_digest(roster_sha256, owner, holder, kind, share) for kind, share in enumerate(pair))


def expect_share(roster_sha256: bytes, owner: int, holder: int, kind: int, share: bytes, committed: bytes) -> None:
    """Check one share, of the seed (``kind`` 0) or of the mask key (1), against the commitment to both.

    Raises:
        SecureError: ``bad-shares`` if the share does not match the commitment.
    """
    shamir.share_value(share)
    wanted = committed[kind * HASH_BYTES : (kind + 1) * HASH_BYTES]
    if _share_digest(roster_sha256, owner, holder, kind, share) != wanted:
        text = f"the share that entry {holder} holds of the {('seed', 'mask key')[kind]} of entry {owner}"
        raise SecureError("bad-shares", f"{text} is not the one that was committed to")


def _share_digest(roster_sha256: bytes, owner: int, holder: int, kind: int, share: bytes) -> bytes:
    where = b"".join(number.to_bytes(4, "big") for number in (owner, holder, kind))
    return hashlib.sha256(b"promptfed/share/1\0" + roster_sha256 + where + share).digest()
