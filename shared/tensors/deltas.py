"""The difference between two bodies of the same length, without loss: for a client that has the earlier one.

Both are combined by XOR. States of consecutive rounds share signs, exponents and the first bits of most numbers, which
become zeros. The first bytes of all four-byte numbers of a part go together, then the second ones, and zlib compresses
the result.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

PART = 4 << 20  # bytes that are worked on at once
WORD = 4


def difference(body: bytes | Path, base: bytes | Path) -> Iterator[bytes]:
    """The parts of what `applied` makes ``body`` from ``base``. Raises ValueError if their lengths differ."""
    now, before = _mapped(body), _mapped(base)
    if len(now) != len(before):
        raise ValueError(f"bodies of {len(now)} and {len(before)} bytes have no difference")
    packer = zlib.compressobj(level=1)
    for begin in range(0, len(now), PART):
        mixed = np.bitwise_xor(now[begin : begin + PART], before[begin : begin + PART])
        yield packer.compress(_shuffled(mixed))
    yield packer.flush()


def applied(delta: Iterable[bytes], base: bytes | Path) -> Iterator[bytes]:
    """The parts of the body from its difference to ``base``.

    Raises:
        ValueError: the parts are not a whole difference to a body of this length.
    """
    before, begin, held, unpacker = _mapped(base), 0, b"", zlib.decompressobj()
    try:
        for part in delta:
            while part:
                held += unpacker.decompress(part, PART)
                part = unpacker.unconsumed_tail
                while len(held) >= PART or (held and begin + len(held) == len(before)):
                    mixed, held = held[:PART], held[PART:]
                    old = before[begin : begin + len(mixed)]
                    if len(old) != len(mixed):
                        raise ValueError("the difference is longer than the body")
                    yield np.bitwise_xor(_ordered(mixed), old).tobytes()
                    begin += len(mixed)
    except zlib.error as error:
        raise ValueError(f"the difference is damaged: {error}") from None
    if begin != len(before) or held or not unpacker.eof:
        raise ValueError("the difference is not whole")


def _mapped(place: bytes | Path) -> np.ndarray:
    if isinstance(place, bytes):
        return np.frombuffer(place, np.uint8)
    with place.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _shuffled(part: np.ndarray) -> bytes:
    whole = len(part) // WORD * WORD
    return part[:whole].reshape(-1, WORD).T.tobytes() + part[whole:].tobytes()


def _ordered(part: bytes) -> np.ndarray:
    given = np.frombuffer(part, np.uint8)
    whole = len(given) // WORD * WORD
    return np.concatenate([given[:whole].reshape(WORD, -1).T.reshape(-1), given[whole:]])
