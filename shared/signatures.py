"""What a coordinator signs with its key: states, cards of exports (Ed25519, RFC 8032)."""

from __future__ import annotations

import json

SIGNATURE_HEADER = "Promptfed-Signature"  # of an answer with a state: Ed25519 over `statement`, in hexadecimal


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
