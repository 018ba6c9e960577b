"""Uploads that continue where they were cut off, after the IETF's draft-ietf-httpbis-resumable-upload.

The upload resource is the task's update itself, so nothing has to be created first. What arrives is written as it
comes, also of a request that is cut off, and the next request continues there.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from promptfed.coordinator import problems
from promptfed.coordinator.http.uploads import CHUNK, Incoming, Uploads, announced_digest
from promptfed.coordinator.store.blobs import PREFIX
from promptfed.coordinator.store.fault_points import point
from promptfed.coordinator.store.partial_uploads import PartialUpload, PartialUploads, TakenOver
from promptfed.shared.methods.core.sizes import BYTES_PER_SECOND

OFFSET, LENGTH, COMPLETE = "Upload-Offset", "Upload-Length", "Upload-Complete"
YES, NO = "?1", "?0"  # a structured field's booleans (RFC 9651)
_INTEGER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Announced:
    """The digest and length of the whole body, as a request announces them."""

    digest: str
    length: int

    @classmethod
    def of(cls, headers: Mapping[str, str], limit: int) -> Announced:
        """From the request's headers. Raises DigestMissing, BadUploadHeaders, BodyTooLarge."""
        try:
            digest = announced_digest(headers.get("repr-digest"))
        except problems.DigestMissing:
            raise problems.DigestMissing("send the whole body's SHA-256 as `Repr-Digest: sha-256=:<base64>:`") from None
        length = _number(headers, LENGTH)
        if length == 0:
            raise problems.BadUploadHeaders(f"{LENGTH} is 0: no update is empty")
        if length > limit:
            text = f"an update may have {limit} bytes (admission.max_bytes); this one is announced with {length}"
            raise problems.BodyTooLarge(text)
        return cls(digest, length)


@dataclass(frozen=True)
class AnnouncedPart:
    """The offset of a request's bytes, and whether they are the last."""

    offset: int
    is_last: bool

    @classmethod
    def of(cls, headers: Mapping[str, str], whole: Announced, size: int | None) -> AnnouncedPart:
        """From the request's headers; ``size``: its Content-Length. Raises BadUploadHeaders, InconsistentLength."""
        offset, complete = _number(headers, OFFSET), headers.get(COMPLETE.lower())
        if complete not in (YES, NO):
            raise problems.BadUploadHeaders(f"{COMPLETE} says {YES} with the last part, {NO} before")
        end = offset + (size or 0)
        if end > whole.length or (complete == YES and size is not None and end != whole.length):
            text = f"bytes up to {end} are announced, and {LENGTH} is {whole.length}"
            raise problems.InconsistentLength(f"{text}: send {COMPLETE}: {YES} with what ends there")
        return cls(offset, complete == YES)


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name.lower(), "")
    if not _INTEGER.fullmatch(text):
        raise problems.BadUploadHeaders(f"{name} is a number of bytes, in up to 15 digits")
    return int(text)


async def receive(
    body: Incoming, part: AnnouncedPart, partial: PartialUpload, partials: PartialUploads, uploads: Uploads
) -> int:
    """Append a request's bytes to the received part; returns how many bytes are durably stored now.

    Raises:
        MismatchingOffset, InconsistentLength, StorageFull: nothing of it was taken, or nothing behind the length.
        TooManyUploads, UploadTimeout, IncompleteBody: what has arrived is kept for the next request.
    """
    async with uploads.place(body):
        reached = await asyncio.to_thread(partial.size)
        if part.offset != reached:
            raise _mismatch(part.offset, reached)
        if reached == 0:
            await asyncio.to_thread(_make_room, partial, partials)
        try:
            reached = await _take(body, part.offset, partial, uploads.timeout)
        except TakenOver:
            raise problems.IncompleteBody("a newer request goes on with this upload") from None
        finally:
            await asyncio.to_thread(partial.sync)
            point("part-kept")
    return reached


def _mismatch(provided: int, expected: int) -> problems.MismatchingOffset:
    text = f"the part begins at byte {provided}, and {expected} bytes have arrived: go on from there"
    members = {"expected-offset": expected, "provided-offset": provided}
    return problems.MismatchingOffset(text, headers={OFFSET: str(expected), COMPLETE: NO}, **members)


def _make_room(partial: PartialUpload, partials: PartialUploads) -> None:
    """Remove other bodies of the task, and check the disk, before the first bytes are written."""
    for other in partials.others(partial):
        other.unlink(missing_ok=True)
    if shutil.disk_usage(partials.folder).free < partial.length:
        raise problems.StorageFull(f"the disk has no room for {partial.length} bytes: make room and send it again")


async def _take(body: Incoming, offset: int, partial: PartialUpload, least_seconds: float) -> int:
    """Write the bytes as they arrive, also those of a request that is cut off."""
    seconds = max(least_seconds, min(body.length or 0, partial.length) / BYTES_PER_SECOND)
    written, waiting, held, writing = offset, list[bytes](), 0, None
    try:
        async with asyncio.timeout(seconds) as partial.limit:
            if not partial.is_newest:
                raise TakenOver
            async for some in body.parts():
                if written + held + len(some) > partial.length:
                    raise problems.InconsistentLength(f"the part goes on behind {LENGTH}, {partial.length} bytes")
                waiting.append(some)
                held += len(some)
                if held >= CHUNK:
                    # A write that is under way ends, whatever becomes of the request.
                    writing = asyncio.create_task(asyncio.to_thread(partial.append, written, waiting))
                    written, waiting, held = written + held, [], 0
                    await asyncio.shield(writing)
    except TimeoutError:
        if not partial.is_newest:
            raise TakenOver from None
        raise problems.UploadTimeout(
            f"the body did not arrive within {seconds:g} s: what has arrived is kept"
        ) from None
    except ClientDisconnect:
        raise problems.IncompleteBody("the connection ended before the body did: what has arrived is kept") from None
    finally:
        partial.limit = None
        if writing is not None:
            await writing
        if waiting:
            await asyncio.to_thread(partial.append, written, waiting)
    return written + held


def digest_of_file(partial: PartialUpload) -> str | None:
    """``sha256:<hex>`` of the received part; None if it was removed."""
    try:
        with partial.path.open("rb") as file:
            return PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
