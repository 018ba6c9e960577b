"""The messages of a secure sum: JSON with hex and base64. Clients are identified by their place in the roster."""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from promptfed.shared.canonical import canonical_json

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Place = Annotated[int, Field(ge=0, lt=1024)]
Places = Annotated[list[Place], Field(max_length=1024)]


def _from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError("is not base64") from None


Bytes = Annotated[
    bytes,
    BeforeValidator(_from_text),
    PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str),
    Field(max_length=200),
]
Given = Annotated[list[tuple[Place, Bytes]], Field(max_length=1024)]
"""Bytes by place."""


class SecureMessage(BaseModel):
    """Base of all messages: unknown keys are refused, and only base64 is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(SecureMessage):
    """One client's keys for one attempt. ``terms``: SHA-256 of its task.

    ``samples``: its number of training samples, from which all members compute its weight; 1 for uniform weights.
    """

    federation_id: Annotated[str, Field(max_length=100)]
    round: Annotated[int, Field(ge=0, le=100_000)]
    phase: Annotated[str, Field(max_length=100)]
    attempt: Annotated[int, Field(ge=1, le=10)]
    identity_key: Hex32
    mask_key: Hex32
    share_key: Hex32
    samples: Annotated[int, Field(ge=0, le=1 << 40)]
    payload_sha256: Digest
    terms: Hex32

    def digest(self) -> bytes:
        """SHA-256 of the entry as canonical JSON, its identifier in the roster."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).digest()


class KeysAnswer(SecureMessage):
    """The answer of step 0: an entry, signed with its identity key."""

    entry: Entry
    signature: Hex64


class RosterMessage(SecureMessage):
    """The input of step 1: the entries of all clients."""

    entries: Annotated[list[KeysAnswer], Field(max_length=1024)]


class SharesAnswer(SecureMessage):
    """The answer of step 1: one encrypted pair of shares for each other client, in order of place.

    ``commitments`` to the pair of each holder, including the client itself, in order of place. ``seed_sha256``: the
    commitment to the seed that the shares open (`promptfed.shared.secagg.commitments`).
    """

    roster_sha256: Hex32
    boxes: Annotated[list[Bytes], Field(max_length=1024)]
    commitments: Annotated[list[Bytes], Field(max_length=1024)]
    seed_sha256: Hex32


class MaskJob(SecureMessage):
    """The input of step 2: the clients that have shared, their boxes for this client, and their commitments."""

    sharing: Places
    boxes: Given
    commitments: Given


class ConfirmJob(SecureMessage):
    """The input of step 3: the clients that have shared, divided by whether their masked vectors count."""

    alive: Places
    dropped: Places


class ConfirmAnswer(SecureMessage):
    """The answer of step 3: a signature of the only list for which this client unmasks."""

    alive_sha256: Hex32
    signature: Hex64


class UnmaskJob(SecureMessage):
    """The input of step 4: the signatures of step 3."""

    signatures: Annotated[list[tuple[Place, Hex64]], Field(max_length=1024)]


class UnmaskAnswer(SecureMessage):
    """The answer of step 4: shares of the seeds of counted clients, and of the mask keys of the others."""

    seeds: Given
    keys: Given


def alive_digest(hashes: list[bytes]) -> str:
    """SHA-256 (hex) over the entries of the counted clients, in order."""
    return hashlib.sha256(canonical_json([digest.hex() for digest in sorted(hashes)]).encode()).hexdigest()
