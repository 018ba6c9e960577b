"""Digests of bodies in headers (RFC 9530), by which what was changed on the way is told from what was sent."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping

CONTENT, WHOLE = "Content-Digest", "Repr-Digest"
"""Headers: of what a message holds; of a whole resource, of which an answer with status 206 holds a part."""

CHANGED = (
    "something on the way, such as a proxy or a virus scanner, changes what is sent: "
    "use https:// where it is http://, or ask your network team"
)
_SHA256 = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):")


class Damaged(Exception):
    """What has arrived is not what was sent, or cannot be read: sent again, it may arrive whole."""


def digest_field(sha256: bytes) -> str:
    """The value of a digest header."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def field_of(content: bytes) -> str:
    """The value of a digest header for ``content``."""
    return digest_field(hashlib.sha256(content).digest())


def sha256_in(header: str | None) -> bytes | None:
    """The SHA-256 of a digest header; None if it holds none."""
    match = _SHA256.search(header or "")
    try:
        raw = base64.b64decode(match[1], validate=True) if match else b""
    except binascii.Error:
        raw = b""
    return raw if len(raw) == hashlib.sha256().digest_size else None


def is_proven(headers: Mapping[str, str], content: bytes, partial: bool = False) -> bool:
    """Whether an answer's decoded body is what its digest says; False if it says none, as of a body that is streamed.

    Something on the way may compress a body, or decompress it, but not change it.

    Raises:
        Damaged: it is something else.
    """
    announced = sha256_in(headers.get(CONTENT)) or (None if partial else sha256_in(headers.get(WHOLE)))
    if announced is not None and announced != hashlib.sha256(content).digest():
        raise Damaged(f"the {len(content)} bytes that arrived do not have their digest")
    return announced is not None
