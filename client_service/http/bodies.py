"""What a client sends, in memory or in a file; and a line of the site's log for each message.

The line is on the disk before the message leaves. It has the message's kind, recipient, size and digest, the shapes of
its tensors and the names of its fields, never a value. Requests without a body, as for tasks and payloads or with a
task's progress, share one line for each hour and recipient, which also has their numbers since the line before.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from promptfed.shared.messages import Task
from promptfed.shared.service.digests import digest_field

CHUNK = 64 << 10  # that is written to the line at once, each within the time for one write
MESSAGES = {"clients": "enrolment", "exchange": "secure sum"}  # by the last part of the path; others are named by it
MOST_HEADER = 1 << 20  # bytes of a safetensors header that are read
Line = dict[str, Any]


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
        return digest_field(bytes.fromhex(self.sha256))

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


@dataclass
class SentLog:
    """Notes what one client sends by ``told``, which raises ClientError where nothing can be written down."""

    told: Callable[[str, Mapping[str, Any]], None]
    rounds: dict[str, tuple[int, str]] = field(default_factory=dict)  # round and phase of the last task, by its id
    _asked: Counter[str] = field(default_factory=Counter)
    _hour: tuple[str, str] = ("", "")
    _message: tuple[str, ...] = ()

    def note(self, address: str, verb: str, path: str, body: Body | None) -> None:
        """Write down a request that is about to be sent; one that is sent again at once has one line.

        Raises:
            ClientError: STATE where it cannot be written down. The request must not be sent then.
        """
        if body is None and verb in ("GET", "HEAD"):
            self._count(address, path)
            return
        message = (address, path.partition("?")[0], body.sha256 if body is not None else "")
        if message == self._message:
            return
        self.told("sent", {"to": address, **_about(path, body, self.rounds)})
        self._message = message

    def asked(self, task: Task) -> None:
        """The coordinator asks for a task."""
        if task.task_id not in self.rounds:
            facts = {"task": task.task_id, "kind": task.kind, "round": task.round, "phase": task.phase}
            self.told("asked", facts | {"payload": task.payload.sha256, "bytes": task.payload.bytes})
        self.rounds = {task.task_id: (task.round, task.phase)}

    def _count(self, address: str, path: str) -> None:
        place = path.partition("?")[0].split("/")
        about = "progress" if "progress=" in path else "payload" if "payload" in place else place[-1]
        self._asked[about] += 1
        hour = (address, f"{datetime.now(UTC):%Y-%m-%dT%H}")
        if hour != self._hour:
            self.told("questions", {"to": address, "asked": dict(self._asked)})
            self._hour = hour
            self._asked.clear()


def _about(path: str, body: Body | None, rounds: dict[str, tuple[int, str]]) -> Line:
    """What a message is, without its values."""
    place = path.partition("?")[0].split("/")
    facts: Line = {"message": MESSAGES.get(place[-1], place[-1])}
    if "tasks" in place:
        facts["task"] = place[-2]
        if place[-2] in rounds:
            facts["round"], facts["phase"] = rounds[place[-2]]
    return facts if body is None else {**facts, "bytes": body.size, "sha256": body.sha256, **_parts(body)}


def _parts(body: Body) -> Line:
    """The names of a message's fields, and the dtypes and shapes of its tensors."""
    if not isinstance(body.content, bytes) or not body.content.startswith(b"{"):
        header = _header(body)
        about = header.pop("__metadata__", {})
        about = json.loads(about.get("promptfed", "null")) or about
        tensors = {name: f"{facts['dtype']} {facts['shape']}" for name, facts in header.items()}
        return {"tensors": tensors, "fields": list(about)}
    return {"fields": [name for name, value in json.loads(body.content).items() if value is not None]}


def _header(body: Body) -> dict[str, Any]:
    if isinstance(body.content, bytes):
        beginning = body.content[: MOST_HEADER + 8]
    else:
        with body.content.open("rb") as file:
            beginning = file.read(MOST_HEADER + 8)
    length = int.from_bytes(beginning[:8], "little")
    try:
        header = json.loads(beginning[8 : 8 + length]) if length <= MOST_HEADER else {}
    except ValueError:
        header = {}
    return header if isinstance(header, dict) else {}
