"""Masks of vectors of integers modulo 2^64."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from promptfed.shared.secagg.keys import agree, derive, public_of

Words = NDArray[np.uint64]
MASKED_ENTRIES = 64  # shortest vector for which a missing mask can be detected
SMALL_WORD = 1 << 60


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
    public = public_of(mask_key)
    first, second = sorted((public, peer))
    stream = words(derive(agree(mask_key, peer), "mask", roster_sha256, first, second), count)
    return stream if public == first else np.uint64(0) - stream


def masked(vector: Words, seed: bytes, mask_key: bytes, peers: Iterable[bytes], roster_sha256: bytes) -> Words:
    """``vector`` plus its self mask and the pair masks with ``peers`` (public mask keys). Raises as `pair_mask`."""
    total = vector + self_mask(seed, roster_sha256, len(vector))
    for peer in peers:
        total += pair_mask(mask_key, peer, roster_sha256, len(vector))
    return total


def looks_unmasked(vector: Words) -> bool:
    """Whether more than half of the words are small, which shows a defective client's update without a mask."""
    if len(vector) < MASKED_ENTRIES:
        return False
    small = vector + np.uint64(SMALL_WORD) < np.uint64(2 * SMALL_WORD)
    return int(small.sum()) * 2 > len(vector)
