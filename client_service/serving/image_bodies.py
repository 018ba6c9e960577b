"""Images as bodies of requests, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from promptfed.client_service.serving.problems import ApiProblem

log = logging.getLogger("promptfed.client")
MAX_IMAGE_BYTES = 20 << 20
BODY_SECONDS = 60.0  # that a body may take
HELD_BYTES = 128 << 20  # of all bodies that are read or worked on
IMAGE_TYPE = "application/octet-stream"
IMAGE_BODY = {
    "requestBody": {"required": True, "content": {IMAGE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


class Held:
    """The bytes of bodies in memory, which have a maximum together."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises ApiProblem where there is no room."""
        if self.bytes + count > HELD_BYTES:
            headers = {"Retry-After": "5", "Connection": "close"}
            detail = "other requests hold the memory for images: send it again in a moment"
            raise ApiProblem(503, "busy", "No room for the body", detail, headers)
        self.bytes += count


async def image_body(request: Request) -> AsyncIterator[bytes]:
    """The request's body, refused as soon as it is larger than ``MAX_IMAGE_BYTES``; it is held until the answer."""
    if request.headers.getlist("content-type") != [IMAGE_TYPE]:
        # A page of elsewhere cannot send this type without being asked about it first.
        raise ApiProblem(415, "media-type", "Another content type", f"send the image's bytes as {IMAGE_TYPE}")
    held: Held = request.app.state.held
    parts: list[bytes] = []
    taken = 0
    try:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    held.take(len(chunk))
                    taken += len(chunk)
                    parts.append(chunk)
                    if taken > MAX_IMAGE_BYTES:
                        detail = f"more than {MAX_IMAGE_BYTES} bytes: send a smaller image"
                        raise ApiProblem(413, "too-large", "Image too large", detail, {"Connection": "close"})
        except TimeoutError:
            detail = f"it did not arrive in {BODY_SECONDS:g} s: send a smaller image"
            raise ApiProblem(408, "too-slow", "The body is too slow", detail, {"Connection": "close"}) from None
        except ClientDisconnect:
            raise gone(request) from None
        yield b"".join(parts)
    finally:
        held.bytes -= taken


def gone(request: Request) -> ApiProblem:
    log.warning("%s: the caller hung up before it was answered", request.url.path)
    return ApiProblem(400, "gone", "The caller has gone", "the connection was closed")
