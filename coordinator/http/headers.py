"""Headers of every answer."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from promptfed.shared.service import digests
from promptfed.shared.versions import PROTOCOL, VERSION

PROTOCOL_HEADER = PROTOCOL.lower().encode()
_SNIFFED = (b"x-content-type-options", b"nosniff")
_OF_THE_API = (_SNIFFED, (b"cache-control", b"no-store"), (PROTOCOL_HEADER, str(VERSION).encode()))


def with_headers(scope: Scope, send: Send) -> Send:
    """``send`` for the answer to a request of ``scope``, which adds its headers.

    These are ``nosniff`` on every answer, ``no-store`` and a digest of the body on those of the API. A page's own files
    say for themselves; so does a body whose digest was known, and one that is streamed has none.
    """
    of_api = scope["path"].startswith("/v1/")
    added = _OF_THE_API if of_api else (_SNIFFED,)
    names = [name for name, _ in added]
    start: Message | None = None  # of an answer whose body is awaited

    async def answer(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            message["headers"] = [*(header for header in headers if header[0] not in names), *added]
            present = {name for name, _ in headers}
            if of_api and b"content-length" in present and b"repr-digest" not in present:
                start = message
                return
        elif start is not None:
            if (body := message.get("body", b"")) and not message.get("more_body", False):
                start["headers"].append((b"content-digest", digests.field_of(body).encode()))
            await send(start)
            start = None
        await send(message)

    return answer
