"""Primitives of secure sums: keys, Shamir's shares, commitments, masks, and tensors as integers modulo 2^b."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import SecureError
from promptfed.shared.tensors import Array, Arrays

Signing = Literal["identity", "keys", "confirm"]
Derived = Literal["self", "mask", "share"]
KEY_BYTES = 32
_FIELD = 2**255 - 19
_OF_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _FIELD - 1, _OF_ORDER_8, _FIELD - _OF_ORDER_8}  # y of the points whose order divides 8
PRIME = 2**256 + 297
SHARE_BYTES = 33
HASH_BYTES = 32
COMMITMENT_BYTES = 2 * HASH_BYTES

Pair = tuple[bytes, bytes]
"""A share of somebody's own mask's seed, and one of its private mask key."""

Words = NDArray[np.uint64]
SCALE = 2.0**32
LARGEST_CHANGE = 16.0
LARGEST_SUM = 1 << 62
MOST_CLIENTS = 1024
MASKED_ENTRIES = 64  # shortest vector for which a missing mask can be detected
SMALL_WORD = 1 << 60
Whole = NDArray[np.int64]


def new_identity() -> bytes:
    """The 32 private bytes of a new Ed25519 key."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_identity(private: bytes) -> bytes:
    """The 32 public bytes of an Ed25519 key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def fingerprint(public: bytes) -> str:
    """The text form of an identity key for comparison over another channel: ``ed25519:`` and its bytes in hex."""
    return "ed25519:" + public.hex()


def sign(private: bytes, purpose: Signing, body: object) -> bytes:
    """64 bytes: the signature of ``body`` as canonical JSON, valid only for ``purpose``."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(_signed(purpose, body))


def is_signed(public: bytes, signature: bytes, purpose: Signing, body: object) -> bool:
    """Whether ``signature`` of ``body`` was made with the key of ``public`` for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(purpose, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(purpose: str, body: object) -> bytes:
    return b"promptfed/" + purpose.encode() + b"/1\0" + canonical_json(body).encode()


def new_pair() -> bytes:
    """The 32 private bytes of a new X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The 32 public bytes of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, peer: bytes) -> bytes:
    """The shared secret (32 bytes) of two X25519 keys.

    Raises:
        SecureError: ``bad-roster`` if the peer's key is invalid: too short, or of small order (all-zero result).
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise SecureError("bad-roster", f"{peer.hex()[:64]!r} is not a valid X25519 key") from None


def expect_exchange_key(public: bytes) -> None:
    """Refuse an X25519 key that nobody can agree with. Raises as `agree`."""
    agree(new_pair(), public)  # of small order with one key, of small order with each


def is_identity(public: bytes) -> bool:
    """Whether an Ed25519 key is one with which signatures tell somebody apart: not of small order."""
    y = int.from_bytes(public, "little") & (1 << 255) - 1
    return len(public) == KEY_BYTES and y % _FIELD not in _SMALL_ORDER


def derive(secret: bytes, purpose: Derived, salt: bytes, first: bytes = b"", second: bytes = b"") -> bytes:
    """32 bytes by HKDF-SHA256: a separate key for each purpose, roster (``salt``) and pair of public keys."""
    info = b"promptfed/" + purpose.encode() + b"/1\0" + first + second
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)


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
    wanted = committed[kind * HASH_BYTES : (kind + 1) * HASH_BYTES]
    if _share_digest(roster_sha256, owner, holder, kind, share) != wanted:
        text = f"the share that entry {holder} holds of the {('seed', 'mask key')[kind]} of entry {owner}"
        raise SecureError("bad-shares", f"{text} is not the one that was committed to")


def _share_digest(roster_sha256: bytes, owner: int, holder: int, kind: int, share: bytes) -> bytes:
    where = b"".join(number.to_bytes(4, "big") for number in (owner, holder, kind))
    return hashlib.sha256(b"promptfed/share/1\0" + roster_sha256 + where + share).digest()


def words(key: bytes, count: int) -> Words:
    """The first ``count`` words of the key's stream, little-endian. A key is used for one stream: a zero nonce."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def self_mask(seed: bytes, roster_sha256: bytes, count: int) -> Words:
    """The mask that a client adds for itself. It is opened if the client's vector counts."""
    return words(derive(seed, "self", roster_sha256), count)


def pair_mask(mask_key: bytes, peer: bytes, roster_sha256: bytes, count: int) -> Words:
    """The mask of a pair: the owner of the private ``mask_key`` adds it and the peer adds its negative, so both cancel.

    Raises:
        SecureError: ``bad-roster`` if ``peer`` is not a valid key.
    """
    own = public_of(mask_key)
    first, second = sorted((own, peer))
    stream = words(derive(agree(mask_key, peer), "mask", roster_sha256, first, second), count)
    return stream if own == first else np.uint64(0) - stream


def masked(vector: Words, seed: bytes, mask_key: bytes, peers: Iterable[bytes], roster_sha256: bytes) -> Words:
    """``vector`` plus its self mask and the pair masks with ``peers`` (public mask keys). Raises as `pair_mask`."""
    total = vector + self_mask(seed, roster_sha256, len(vector))
    for peer in peers:
        total += pair_mask(mask_key, peer, roster_sha256, len(vector))
    return total


def flat_change(update: Mapping[str, Array], payload: Mapping[str, Array]) -> NDArray[np.float64]:
    """``(d,)`` float64: update - payload over all tensors in name order; tensors missing in the payload count as zero.

    Raises:
        SecureError: ``out-of-range`` if a number is not finite or has changed by more than 16.
    """
    parts = []
    for name, tensor in sorted(update.items()):
        before = payload.get(name)
        change = np.asarray(tensor).astype(np.float64)
        if before is not None and before.shape == tensor.shape:
            change -= np.asarray(before).astype(np.float64)
        flat = change.reshape(-1)
        if flat.size and not bool(np.all(np.abs(flat) <= LARGEST_CHANGE)):
            text = f"the change of {name!r} is beyond {LARGEST_CHANGE:g} or not finite: training has diverged"
            raise SecureError("out-of-range", f"{text}; lower training.learning_rate")
        parts.append(flat)
    return np.concatenate(parts) if parts else np.zeros(0)


def blurred(change: NDArray[np.float64], update: Mapping[str, Array]) -> NDArray[np.float64]:
    """``change`` plus uniform noise of up to half the spacing of float32 at the numbers of ``update``.

    Float32 numbers lie on a grid. If one client's grid were finer than all others', because of its weight or its small
    numbers, the low digits of the sum would be that client's. The noise is derived from the update's bytes, so the same
    training gives the same numbers. Without the update, nobody knows the noise.
    """
    flat = np.concatenate([np.asarray(tensor).astype(np.float32).reshape(-1) for _, tensor in sorted(update.items())])
    step = np.abs(flat - np.nextafter(flat, np.float32(0))).astype(np.float64)
    key = hashlib.sha256(b"promptfed/blur/1\0" + flat.tobytes()).digest()
    draws: NDArray[np.float64] = (words(key, len(flat)) >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    moved: NDArray[np.float64] = change + draws * step
    return moved


def encoded(change: NDArray[np.float64], weight: float = 1.0) -> Whole:
    """x = rint(Δ·a·2³²)."""
    return np.rint(change * (weight * SCALE)).astype(np.int64)


def signed_sum(total: Words) -> Whole:
    """The sum as signed numbers.

    Raises:
        SecureError: ``sum-invalid`` if a number exceeds the largest sum of honest clients.
    """
    signed = total.view(np.int64)
    if signed.size and (int(signed.max()) > LARGEST_SUM or int(signed.min()) < -LARGEST_SUM):
        raise SecureError("sum-invalid", "the sum is beyond 2^62: a client's masked vector or share was wrong")
    return signed


def mean_change(total: Whole, weight: float) -> NDArray[np.float64]:
    """Σ x/(2³²·Σ a) in float64; ``weight``: Σ a.

    Raises:
        SecureError: ``sum-invalid`` if a number of the mean exceeds the bound for every client's change.
    """
    mean: NDArray[np.float64] = total.astype(np.float64) / (SCALE * weight)
    if mean.size and float(np.abs(mean).max()) > LARGEST_CHANGE:
        text = f"the mean has changed by more than {LARGEST_CHANGE:g}: a client's part was wrong"
        raise SecureError("sum-invalid", text)
    return mean


def as_tensors(
    mean: NDArray[np.float64], payload: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> Arrays:
    """The payload plus the mean change, float32, with the names and ``shapes`` of an update."""
    result, begin = {}, 0
    for name, shape in sorted(shapes.items()):
        size = int(np.prod(shape, dtype=np.int64))
        change = mean[begin : begin + size].reshape(shape)
        before = payload.get(name)
        if before is not None and tuple(before.shape) == tuple(shape):
            change = change + before.astype(np.float64)
        result[name] = change.astype(np.float32)
        begin += size
    if begin != len(mean):
        raise ValueError(f"a vector of {len(mean)} numbers does not fill tensors of {begin}")
    return result


def looks_unmasked(vector: Words) -> bool:
    """Whether more than half of the words are small, which shows a defective client's update without a mask."""
    if len(vector) < MASKED_ENTRIES:
        return False
    small = vector + np.uint64(SMALL_WORD) < np.uint64(2 * SMALL_WORD)
    return int(small.sum()) * 2 > len(vector)
