"""Large blobs as answers, memory-mapped.

The framework reads a file 64 KB at a time, each time in a thread: for a payload of 5 MB that costs several times what
sending it does. ASGI's ``http.response.pathsend`` extension hands the path over instead, and is answered here. A blob
never changes, and one that is removed stays there for whoever has mapped it.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

BY_PATH = "http.response.pathsend"
_FROM = re.compile(r"bytes=(\d{1,15})-")
PART = 256 << 10  # bytes that are handed over at once; the next ones once the connection takes more


def first_byte(asked: str | None) -> int:
    """The first byte of a header ``Range: bytes=N-``, the only form that clients send; else 0."""
    match = _FROM.fullmatch(asked or "")
    return int(match[1]) if match else 0


class BlobFile(FileResponse):
    """A file as the body of an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def send_mapped(message: Message) -> None:
            if message["type"] == BY_PATH:
                await _send_mapped(Path(message["path"]), send)
            else:
                await send(message)

        extensions = {**scope.get("extensions", {}), BY_PATH: {}}
        await super().__call__({**scope, "extensions": extensions}, receive, send_mapped)


async def _send_mapped(path: Path, send: Send) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Nothing closes it: parts of it may wait in the connection's buffer, and with the last of them it is gone.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    whole = memoryview(mapped)
    for begin in range(0, max(size, 1), PART):
        more = begin + PART < size
        await send({"type": "http.response.body", "body": whole[begin : begin + PART], "more_body": more})
