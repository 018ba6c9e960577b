"""Canonical JSON (sorted keys, no spaces), and Ed25519 signatures of it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

SIGNATURE_HEADER = "Promptfed-Signature"  # of an answer with a state: Ed25519 over `statement`, in hexadecimal


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse_json(text: bytes) -> Any:
    """The one value that all readers agree on.

    Raises:
        ValueError: it is no JSON in UTF-8, an object has a key twice, a number is NaN or infinite, or it is nested too
            deeply to be read.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=each_key_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a mapping. Raises ValueError for a repeated key: readers differ in which of two values they take."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {twice[:100]!r} twice")
    return mapping


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}")


def statement(federation: str, round: int, state_hash: str) -> bytes:
    """What is signed: the federation's id, the round and the state's hash, under a heading of its own."""
    said = {"federation": federation, "round": round, "state_hash": state_hash}
    return b"promptfed state 1\n" + json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def export_statement(card: bytes) -> bytes:
    """What is signed of an export: the bytes of its ``card.json``, which names every other file with its digest."""
    return b"promptfed export 1\n" + card


def is_signed(public_key: str, signature: str, said: bytes) -> bool:
    """Whether the key, in hexadecimal, has signed just this; False also for what is no key or signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), said)
    except (InvalidSignature, ValueError):
        return False
    return True
