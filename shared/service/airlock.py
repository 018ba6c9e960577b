"""The files of the air gap: a signed header with one body of bytes.

A file is ``MAGIC``, the header's length (4 bytes), the header as canonical JSON, an Ed25519 signature of all that (64
bytes) and the body, whose size and digest the header names. ``kind`` is ``tasks`` (signed by the coordinator) or
``answers`` (signed by the client); both name the federation and the client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from promptfed.shared.canonical import canonical_json, parse_json

MAGIC = b"promptfed-airlock/1\n"
SIGNATURE_BYTES = 64
MOST_HEADER = 64 << 20

Kind = Literal["tasks", "answers"]


class AirlockError(ValueError):
    """A file that is none, or not the one that it should be; the text says what is wrong with it."""


@dataclass(frozen=True)
class Sealed:
    """What a verified file holds. ``digest``: of the whole file, ``sha256:<hex>``."""

    header: Mapping[str, Any]
    body: bytes
    digest: str


def seal(header: Mapping[str, Any], body: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """The file; ``sign`` returns the 64 bytes of an Ed25519 signature."""
    whole = {**header, "body_bytes": len(body), "body_sha256": hashlib.sha256(body).hexdigest()}
    text = canonical_json(whole).encode()
    signed = MAGIC + len(text).to_bytes(4, "big") + text
    return signed + sign(signed) + body


def unseal(content: bytes, kind: Kind, key_of: Callable[[Mapping[str, Any]], bytes]) -> Sealed:
    """The verified file. ``key_of`` returns the signer's 32 public bytes for a header that is not verified yet.

    Raises:
        AirlockError: the file is of another kind, cut, changed, or signed by somebody else.
    """
    start = len(MAGIC) + 4
    if not content.startswith(MAGIC) or len(content) < start:
        raise AirlockError("no `promptfed airlock` wrote this file: give one that it wrote")
    length = int.from_bytes(content[len(MAGIC) : start], "big")
    end = start + length
    if length > MOST_HEADER or len(content) < end + SIGNATURE_BYTES:
        raise AirlockError("the file is cut: copy it again")
    try:
        header = parse_json(content[start:end])
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise AirlockError("the file is damaged: copy it again")
    if header.get("kind") != kind:
        raise AirlockError(f"this is no file with {kind}")
    try:
        key = Ed25519PublicKey.from_public_bytes(key_of(header))
        key.verify(content[end : end + SIGNATURE_BYTES], content[:end])
    except (InvalidSignature, ValueError) as error:
        if isinstance(error, AirlockError):
            raise
        raise AirlockError("the signature is not the sender's: the file was changed, or is somebody else's") from None
    body = content[end + SIGNATURE_BYTES :]
    if (len(body), hashlib.sha256(body).hexdigest()) != (header.get("body_bytes"), header.get("body_sha256")):
        raise AirlockError("the file is cut or changed after its header: copy it again")
    return Sealed(header, body, "sha256:" + hashlib.sha256(content).hexdigest())


def public_key(text: object) -> bytes:
    """The 32 bytes of a key in hex. Raises AirlockError."""
    try:
        key = bytes.fromhex(str(text))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise AirlockError("the file names no key of its sender")
    return key
