"""Large bodies over slow lines, which are never in memory as a whole.

An update that breaks off is sent again; a payload that breaks off goes on where it stopped, by ranges (RFC 9110).
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from promptfed.client_service.http.bodies import Body, sha256_of
from promptfed.client_service.http.connection import (
    MAX_JSON_BYTES,
    TIMEOUT,
    BadAnswer,
    CoordinatorConnection,
    Patience,
    Refused,
    Unavailable,
)
from promptfed.shared.machine import sync_folder

IN_FILES = 16 << 20  # bytes from which a payload comes into a file
# An update is answered once the whole was hashed, looked through and put on the disk.
TIMEOUTS = httpx.Timeout(300.0, connect=TIMEOUT.connect)
BROKEN_OFF = ("incomplete-body", "upload-timeout", "digest-mismatch")  # refusals of what did not arrive as it was sent
ATTEMPTS = 3  # that may end with one of them
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


async def send(connection: CoordinatorConnection, url: str, body: Body) -> None:
    """Send a body to ``url``, again from its beginning where it breaks off; returns once it is accepted.

    Raises:
        Refused: the coordinator does not take it.
        ClientError: UNREACHABLE where nobody has answered for ``connection.give_up_after`` seconds.
    """
    headers = {
        "Authorization": f"Bearer {connection.token}",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(body.size),
        "Content-Digest": body.digest_field,
    }
    patience, broken = Patience(connection), 0
    while True:
        try:
            await connection.once("PUT", url, body.parts, headers, TIMEOUTS, limit=MAX_JSON_BYTES, whole=body)
        except Refused as refused:
            broken += 1
            if refused.kind not in BROKEN_OFF or broken == ATTEMPTS:
                raise
            await patience.wait(Unavailable(refused.status, refused.detail, None))
        except (httpx.TransportError, Unavailable) as error:
            await patience.wait(error)
        else:
            patience.moved()
            return


@dataclass(frozen=True)
class Wanted:
    """A body that is announced: its size, and its digest as ``sha256:<hex>``."""

    size: int
    digest: str


async def fetch(connection: CoordinatorConnection, url: str, wanted: Wanted, folder: Path) -> Path:
    """Fetch the body at ``url`` into a file of ``folder``, unless it is there; other files of the folder are deleted.

    Raises:
        BadAnswer: it is not what was announced.
        Refused: the coordinator does not give it.
    """
    name = wanted.digest.removeprefix("sha256:")
    path, draft = folder / name, folder / f"{name}.part"
    if await asyncio.to_thread(_is_there, path, draft):
        return path
    patience = Patience(connection)
    while (have := _size(draft)) < wanted.size:
        try:
            await _receive(connection, url, wanted, draft, have)
        except (httpx.TransportError, Unavailable) as error:
            if _size(draft) > have:
                patience.moved()
            await patience.wait(error)
    digest = "sha256:" + await asyncio.to_thread(sha256_of, draft)
    if digest != wanted.digest or _size(draft) != wanted.size:
        have = _size(draft)
        draft.unlink()
        raise BadAnswer(
            f"the payload has {have} bytes and digest {digest}; {wanted.size} bytes and {wanted.digest} were announced"
        )
    draft.replace(path)
    sync_folder(folder)
    return path


def _is_there(path: Path, draft: Path) -> bool:
    """Whether the whole file is there already. Other files are deleted."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in path.parent.iterdir():
        if other not in (path, draft):
            other.unlink()
    return path.exists() and sha256_of(path) == path.name


async def _receive(connection: CoordinatorConnection, url: str, wanted: Wanted, draft: Path, have: int) -> None:
    """Append to the draft. Raises BadAnswer, Refused, Unavailable, TransportError."""
    # As it lies there: of a compressed body no range could be told by what has arrived.
    headers = {"Authorization": f"Bearer {connection.token}", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": f'"{wanted.digest}"'}
    async with connection.answered("GET", url, lambda: None, headers, TIMEOUT) as response:
        if not response.is_success:
            connection.take(response, await connection.read(response, MAX_JSON_BYTES))
        begin = _begin(response, wanted) if response.status_code == 206 else 0
        if begin > have:
            raise BadAnswer(f"the payload was asked for from byte {have} on, and comes from byte {begin}")
        with draft.open("r+b" if begin else "wb") as file:
            file.seek(begin)
            file.truncate()
            await _write(connection, response, file, wanted.size - begin)


async def _write(connection: CoordinatorConnection, response: httpx.Response, file: BinaryIO, most: int) -> None:
    written = 0
    try:
        async for chunk in response.aiter_raw():
            written += len(chunk)
            if written > most:
                raise BadAnswer(f"the payload has more than the {most} bytes that were announced")
            file.write(chunk)
    finally:
        connection.traffic.bytes_down += written


def _begin(response: httpx.Response, wanted: Wanted) -> int:
    told = response.headers.get("content-range", "")
    match = _RANGE.fullmatch(told)
    if match is None or int(match[3]) != wanted.size:
        raise BadAnswer(f"the payload comes as {told[:100]!r}; {wanted.size} bytes were announced")
    return int(match[1])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
