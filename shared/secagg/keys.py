"""Keys of secure sums: signatures, shared secrets, and keys that are derived from them."""

from __future__ import annotations

from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from promptfed.shared.canonical import canonical_json
from promptfed.shared.secagg import SecureError

Signing = Literal["identity", "keys", "confirm"]
Derived = Literal["self", "mask", "share"]
KEY_BYTES = 32
_FIELD = 2**255 - 19
_OF_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {0, 1, _FIELD - 1, _OF_ORDER_8, _FIELD - _OF_ORDER_8}  # y of the points whose order divides 8


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
