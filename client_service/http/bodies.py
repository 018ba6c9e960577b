"""What a client sends, in memory or in a file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 64 << 10  # that is written to the line at once, each within the time for one write


@dataclass(frozen=True)
class Body:
    """Bytes in memory or in a file, with their SHA-256 in hex."""

    content: bytes | Path
    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Body:
        """A body of bytes in memory."""
        return cls(content, len(content), hashlib.sha256(content).hexdigest())

    @property
    def digest_field(self) -> str:
        """The value of a digest header (RFC 9530)."""
        return f"sha-256=:{base64.b64encode(bytes.fromhex(self.sha256)).decode()}:"

    def read(self) -> bytes:
        """All bytes."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    async def parts(self) -> AsyncIterator[bytes]:
        """All bytes, in chunks."""
        if isinstance(self.content, bytes):
            for at in range(0, self.size, CHUNK):
                yield self.content[at : at + CHUNK]
            return
        with self.content.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
