"""Shamir's shares of a secret, and the commitments to them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

from promptfed.shared.secagg import SecureError

PRIME = 2**256 + 297
SHARE_BYTES = 33
HASH_BYTES = 32
COMMITMENT_BYTES = 2 * HASH_BYTES
Pair = tuple[bytes, bytes]
"""A share of somebody's own mask's seed, and one of its private mask key."""


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """The share of ``secret`` (32 bytes) for each of ``places``, which are distinct and at least 1."""
    if not 1 <= threshold <= len(places) or len(set(places)) < len(places) or min(places) < 1:
        raise ValueError(f"{len(places)} shares of which {threshold} open the secret cannot be made")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def _value(coefficients: Sequence[int], at: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * at + coefficient) % PRIME
    return value


def factors(places: Sequence[int]) -> dict[int, int]:
    """The factor of each share at ``places``: the Lagrange polynomials at 0."""
    at_zero = {}
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        at_zero[place] = above * pow(below, -1, PRIME) % PRIME
    return at_zero


def combine(shares: Mapping[int, bytes], at_zero: Mapping[int, int] | None = None) -> bytes:
    """The secret opened by exactly as many ``shares`` (by place) as the threshold; ``at_zero``: their `factors`.

    Raises:
        SecureError: ``bad-shares`` if they do not make 32 bytes. False shares can give other bytes: check the result.
    """
    at_zero = factors(sorted(shares)) if at_zero is None else at_zero
    value = sum(at_zero[place] * share_value(share) for place, share in shares.items()) % PRIME
    if value >= 1 << 256:
        raise SecureError("bad-shares", "the shares do not belong together: they make no secret of 32 bytes")
    return value.to_bytes(32, "big")


def share_value(share: bytes) -> int:
    """A share as a number. Raises SecureError (``bad-shares``) if it is not in the field."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise SecureError("bad-shares", f"a share has {SHARE_BYTES} bytes and is less than the field's prime")
    return value


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
    share_value(share)
    expected = committed[kind * HASH_BYTES : (kind + 1) * HASH_BYTES]
    if _share_digest(roster_sha256, owner, holder, kind, share) != expected:
        text = f"the share that entry {holder} holds of the {('seed', 'mask key')[kind]} of entry {owner}"
        raise SecureError("bad-shares", f"{text} is not the one that was committed to")


def _share_digest(roster_sha256: bytes, owner: int, holder: int, kind: int, share: bytes) -> bytes:
    where = b"".join(number.to_bytes(4, "big") for number in (owner, holder, kind))
    return hashlib.sha256(b"promptfed/share/1\0" + roster_sha256 + where + share).digest()
