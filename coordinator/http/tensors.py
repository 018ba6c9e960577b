"""Tensors as bodies of requests and answers: their media type, what they may be refused for, and stored ones sent."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import Response
from fastapi.responses import FileResponse

from promptfed.coordinator import problems
from promptfed.coordinator.http.openapi import body
from promptfed.coordinator.http.uploads import CHUNK
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

_FROM = re.compile(r"bytes=(\d{1,15})-")


def tensors_at(place: bytes | Path, sha256: str, headers: dict[str, str]) -> Response:
    """An answer with stored tensors: of a row in memory, or of a file."""
    headers = headers | {digests.WHOLE: digests.digest_field(bytes.fromhex(sha256.removeprefix("sha256:")))}
    if isinstance(place, bytes):
        return Response(place, media_type=TENSORS_TYPE, headers=headers)
    return BlobFile(place, media_type=TENSORS_TYPE, headers=headers)


def first_byte(header: str | None) -> int:
    """The first byte of a header ``Range: bytes=N-``, the only form that clients send; else 0."""
    match = _FROM.fullmatch(header or "")
    return int(match[1]) if match else 0


class BlobFile(FileResponse):
    """A file as the body of an answer, read a megabyte at a time."""

    chunk_size = CHUNK
