"""Tensors as bodies of requests and answers: their media type, what they may be refused for, and stored ones sent."""

from __future__ import annotations

from pathlib import Path

from fastapi import Response

from promptfed.coordinator import problems
from promptfed.coordinator.http.bodies import BlobFile
from promptfed.coordinator.http.deps import body
from promptfed.shared.service import digests

TENSORS_TYPE = "application/octet-stream"
TENSOR_BODY = body(TENSORS_TYPE, {"type": "string", "format": "binary"})
TENSORS = (
    problems.BodyTooLarge,
    *problems.TENSOR_REFUSALS.values(),
    problems.IncompleteBody,
    problems.TooManyUploads,
    problems.StorageFull,
)
"""What a body of tensors may be refused for."""


def tensors_at(place: bytes | Path, sha256: str, headers: dict[str, str]) -> Response:
    """An answer with stored tensors: of a row in memory, or of a file."""
    headers = headers | {digests.WHOLE: digests.digest_field(bytes.fromhex(sha256.removeprefix("sha256:")))}
    if isinstance(place, bytes):
        return Response(place, media_type=TENSORS_TYPE, headers=headers)
    return BlobFile(place, media_type=TENSORS_TYPE, headers=headers)
