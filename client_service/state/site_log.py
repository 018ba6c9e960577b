"""`site-log.jsonl`: what was asked of this client, shown to its owner, agreed, computed, sent and refused.

A line is JSON with its number ``n``, the time, ``what`` and facts: digests and sizes, no tensor and no image. Its
``chain`` is the SHA-256 of the previous line's chain and of this line without it. `site-log.head` has the last line's
number and chain. It first names the next line, so that a kill between the two leaves no doubt which lines are genuine.
Who can write to the folder can write both anew: keep a head elsewhere, such as `promptfed site-log verify` prints.

In words: what a client sends, by message and field, for its help; and what it has sent, from this record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from promptfed.client_service.exits import ClientError, Exit
from promptfed.shared import machine
from promptfed.shared.files import write_whole
from promptfed.shared.plain_text import counted
from promptfed.shared.service.fault_points import point
from promptfed.shared.service.reasons import why

FILE, HEAD = "site-log.jsonl", "site-log.head"

Line = dict[str, Any]


class ChangedLog(ValueError):
    """A site log that is not what was written; the text says where."""


@dataclass(frozen=True)
class Head:
    """The last line's number and chain; ``next``: the chain of a line that may have been written since."""

    n: int = 0
    chain: str = ""
    next: str | None = None


@dataclass
class SiteLog:
    """The log of one state folder. A withdrawal may write to it while the client runs."""

    folder: Path
    _end: tuple[int, Head] = field(default=(-1, Head()))  # size of the file after the last own line, and the head

    def note(self, what: str, facts: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns.

        Raises:
            ClientError: STATE where it cannot be written, or the log was changed.
        """
        try:
            handle = machine.open_to_lock(self.folder)
            try:
                machine.lock(handle)
                self._add({"what": what, **{name: value for name, value in facts.items() if value is not None}})
            finally:
                os.close(handle)
        except OSError as error:
            text = f"{self.folder / FILE} cannot be written ({why(error)})"
            raise ClientError(Exit.STATE, f"{text}: nothing is done unrecorded; free some space, or mend it") from None
        except ChangedLog as error:
            text = f"{error}: move {FILE} and {HEAD} away to begin another log"
            raise ClientError(Exit.STATE, text) from None

    def _add(self, facts: Line) -> None:
        size, head = self._found()
        line = {"n": head.n + 1, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
        line = json.loads(json.dumps(line, default=str))
        chain = chained(head.chain, line)
        content = (json.dumps(line | {"chain": chain}) + "\n").encode()
        self._write_head(Head(head.n, head.chain, chain))
        point("site-log-announced")
        handle = os.open(self.folder / FILE, os.O_WRONLY | os.O_CREAT | machine.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.truncate(size)  # what a kill left of a line
            file.seek(size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        point("site-log-written")
        head = Head(head.n + 1, chain)
        self._write_head(head)
        self._end = (size + len(content), head)

    def _found(self) -> tuple[int, Head]:
        """Where the next line begins, and the head. Raises ChangedLog."""
        path = self.folder / FILE
        size = path.stat().st_size if path.exists() else 0
        if size != self._end[0]:
            lines, whole, head = _read(self.folder)
            last = Head(len(lines), str(lines[-1]["chain"]) if lines else "")
            _expect_head(path, lines, head)
            self._end = (whole, last)
        return self._end

    def _write_head(self, head: Head) -> None:
        known = {name: value for name, value in vars(head).items() if value is not None}
        write_whole(self.folder / HEAD, json.dumps(known).encode(), mode=0o600)


def chained(before: str, line: Line) -> str:
    """The chain of ``line``, which has none yet, after a line with the chain ``before``."""
    return hashlib.sha256((before + json.dumps(line)).encode()).hexdigest()


def read(folder: Path) -> list[Line]:
    """The lines as they are, verified or not; an unfinished last one is left out. Raises ChangedLog."""
    return _read(folder)[0]


def verify(folder: Path, link: str | None = None) -> Head:
    """Compute the chain again; the last line's number and chain. ``link``: a chain that a line must have.

    Raises:
        ChangedLog: a line was changed, cut off, moved or forged; or there is no log.
    """
    path = folder / FILE
    lines, whole, head = _read(folder)
    if not lines:
        raise ChangedLog(f"{path} has no line, or was never written: name the client's --state-dir")
    chain = ""
    for number, line in enumerate(lines, 1):
        facts = {name: value for name, value in line.items() if name != "chain"}
        chain = chained(chain, facts)
        if line.get("n") != number or line.get("chain") != chain:
            raise ChangedLog(f"line {number} of {path} does not follow from the one before")
    _expect_head(path, lines, head)
    if whole != path.stat().st_size and head.next is None:
        raise ChangedLog(f"{path} ends in a line that nobody announced")
    if link is not None and link not in {line["chain"] for line in lines}:
        raise ChangedLog(f"no line of {path} has the chain {link}: its end was cut, or all of it was written anew")
    return Head(len(lines), chain)


def _expect_head(path: Path, lines: list[Line], head: Head) -> None:
    last = lines[-1]["chain"] if lines else ""
    if (len(lines), last) not in ((head.n, head.chain), (head.n + 1, head.next)):
        raise ChangedLog(f"{path} has {len(lines)} lines and does not end as {HEAD} says: its end was changed")


def _read(folder: Path) -> tuple[list[Line], int, Head]:
    """The whole lines, their bytes, and the head. Raises ChangedLog."""
    path = folder / FILE
    try:
        content = path.read_bytes() if path.exists() else b""
        head = Head(**json.loads((folder / HEAD).read_bytes())) if (folder / HEAD).exists() else Head()
    except OSError as error:
        raise ChangedLog(f"{folder} cannot be read ({why(error)})") from None
    except (ValueError, TypeError, RecursionError):
        raise ChangedLog(f"{folder / HEAD} is damaged") from None
    content = content[: content.rfind(b"\n") + 1]
    lines: list[Line] = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            is_whole = json.dumps(line).encode() == text and {"what", "chain"} <= line.keys()
        except (ValueError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise ChangedLog(f"line {number} of {path} is not as it was written")
        lines.append(line)
    return lines, len(content), head


def digest(text: str) -> str:
    """A text's SHA-256."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def sent_lines(folder: Path, log_format: Literal["text", "json"]) -> list[str]:
    """What has left this machine, from the record in a state folder.

    Raises:
        ClientError: STATE where there is no record, or it was changed.
    """
    try:
        lines = [line for line in read(folder) if line["what"] in ("sent", "questions")]
        if not lines:
            text = f"{folder} records no message: give the --state-dir of a client that has joined"
            raise ClientError(Exit.STATE, text)
        verify(folder)
    except ChangedLog as changed:
        raise ClientError(Exit.STATE, f"the site log was changed: {changed}") from None
    if log_format == "json":
        return [json.dumps(line) for line in lines]
    messages = [line for line in lines if line["what"] == "sent"]
    total = sum(line.get("bytes", 0) for line in messages)
    sent = f"{counted(len(messages), 'message')} of {total:,} bytes"
    head = f"{folder / FILE}: {sent}; no line was changed or removed"
    kinds: dict[str, list[int]] = {}
    for line in messages:
        kinds.setdefault(line["message"], []).append(line.get("bytes", 0))
    totals = [
        f"  {kind}: {counted(len(sizes), 'message')}, {sum(sizes):,} bytes" for kind, sizes in sorted(kinds.items())
    ]
    return [head, *totals, *(text for line in lines for text in _described(line))]


def _described(line: Line) -> list[str]:
    """One message in words, or the questions of an hour."""
    at = line["at"][:19].replace("T", " ")
    if line["what"] == "questions":
        counts = ", ".join(f"{count} for {name}" for name, count in line["asked"].items()) or "none"
        text = f"{at}  requests without a body to {line['to']}, also later in this hour"
        return [f"{text}; since the last such line: {counts}"]
    begin = f"{at}  {line['message']}"
    where = f", round {line['round']}, {line['phase']}" if "round" in line else ""
    size = f", {line['bytes']:,} bytes, sha256 {line['sha256']}" if "bytes" in line else ""
    lines = [f"{begin}{where} to {line['to']}{size}"]
    lines += [f"    tensor {name}: {shape}" for name, shape in line.get("tensors", {}).items()]
    return lines + ([f"    fields {', '.join(line['fields'])}"] if line.get("fields") else [])
