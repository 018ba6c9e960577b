"""Shamir's scheme over the prime field of p = 2²⁵⁶ + 297: any ``threshold`` shares of a secret open it.

The field is larger than every secret of 32 bytes. Values have 33 bytes, big-endian. Coefficients come from `secrets`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from promptfed.shared.secagg import SecureError

PRIME = 2**256 + 297
SHARE_BYTES = 33


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
