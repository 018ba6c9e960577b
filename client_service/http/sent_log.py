"""`sent.jsonl`: a line for each message that leaves this machine, on the disk before the message leaves.

A line has the message's kind, recipient, size and digest, the shapes of its tensors and the names of its fields, never
a value. Requests without a body, as for tasks and payloads or with a task's progress, share one line for each hour and
recipient, which also has their numbers since the line before. A line's ``chain`` is the SHA-256 of the previous line's
chain and of this line without it. A full file is renamed to ``sent-NUMBER.jsonl``; the last `KEPT` are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import Body
from promptfed.shared import machine
from promptfed.shared.messages import Task
from promptfed.shared.service.reasons import why

FILE, OLDER = "sent.jsonl", "sent-*.jsonl"
MOST_BYTES, KEPT = 8 << 20, 8
MESSAGES = {"clients": "enrolment", "exchange": "secure sum"}  # by the last part of the path; others are named by it
MOST_HEADER = 1 << 20  # bytes of a safetensors header that are read

Line = dict[str, Any]


@dataclass
class SentLog:
    """The record of one state folder. A withdrawal may write to it while the client runs.

    ``told``: also gets each message and each task, for the site's log.
    """

    folder: Path
    told: Callable[[str, Mapping[str, Any]], None] = lambda what, facts: None
    rounds: dict[str, tuple[int, str]] = field(default_factory=dict)  # round and phase of the last task, by its id
    _asked: Counter[str] = field(default_factory=Counter)
    _hour: tuple[str, str] = ("", "")
    _message: tuple[str, ...] = ()
    _end: tuple[int, int, str] = (-1, 0, "")  # size of the file after the last own line, that line's number and chain

    def note(self, address: str, verb: str, path: str, body: Body | None) -> None:
        """Write down a request that is about to be sent; one that is sent again at once has one line.

        Raises:
            ClientError: STATE where it cannot be written down. The request must not be sent then.
        """
        if body is None and verb in ("GET", "HEAD"):
            self._count(address, path)
            return
        message = (address, path, body.sha256 if body is not None else "")
        if message == self._message:
            return
        facts = {"to": address, **_about(path, body, self.rounds)}
        self._write(facts)
        self.told("sent", {"message": facts.pop("what"), **facts, "line": self._end[1]})
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
            self._write({"to": address, "what": "questions", "asked": dict(self._asked)})
            self._hour = hour
            self._asked.clear()

    def _write(self, facts: Line) -> None:
        try:
            with self._alone() as path:
                size, number, chain = self._found(path)
                if size > MOST_BYTES:
                    self._turn(path, number)
                    size = 0
                line = {"n": number + 1, "at": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts}
                chain = chained(chain, line)
                content = (json.dumps(line | {"chain": chain}) + "\n").encode()
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | machine.O_CLOEXEC, 0o600)
                with os.fdopen(handle, "wb") as file:
                    file.truncate(size)  # what a kill left of a line, whose message was never sent
                    file.seek(size)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            text = f"{self.folder / FILE} cannot be written ({why(error)})"
            raise ClientError(Exit.STATE, f"{text}: nothing is sent unrecorded; free some space, or mend it") from None
        self._end = (size + len(content), number + 1, chain)

    @contextmanager
    def _alone(self) -> Iterator[Path]:
        """The file, while no other process writes to it."""
        handle = machine.open_to_lock(self.folder)
        try:
            machine.lock(handle)
            path = self.folder / FILE
            is_new = not path.exists()
            yield path
            if is_new:
                machine.sync_folder(self.folder)
        finally:
            os.close(handle)

    def _found(self, path: Path) -> tuple[int, int, str]:
        """Where the next line begins, and the number and chain of the last one."""
        size = path.stat().st_size if path.exists() else 0
        if size == self._end[0]:
            return self._end
        whole = path.read_bytes() if size else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        for content in (whole, *(old.read_bytes() for old in reversed(older(self.folder)))):
            if content:
                try:
                    last = json.loads(content.splitlines()[-1])
                    return len(whole), int(last["n"]), str(last["chain"])
                except (ValueError, KeyError, TypeError):
                    text = f"{self.folder / FILE} is damaged: move it away (its last line cannot be read)"
                    raise ClientError(Exit.STATE, text) from None
        return 0, 0, ""

    def _turn(self, path: Path, number: int) -> None:
        os.rename(path, path.with_name(OLDER.replace("*", f"{number:09}")))
        for old in older(self.folder)[:-KEPT]:
            old.unlink()


def older(folder: Path) -> list[Path]:
    """The full files, oldest first."""
    return sorted(folder.glob(OLDER))


def chained(before: str, line: Line) -> str:
    """The chain of ``line``, which has none yet, after a line with the chain ``before``."""
    return hashlib.sha256((before + json.dumps(line)).encode()).hexdigest()


def read_sent(folder: Path) -> tuple[list[Line], str | None]:
    """The lines of the record, and what is wrong with the record, if anything; an unfinished last line is left out.

    Raises:
        ClientError: STATE where it cannot be read.
    """
    lines: list[Line] = []
    wrong = None
    try:
        for path in (*older(folder), folder / FILE):
            content = path.read_bytes() if path.exists() else b""
            for text in content[: content.rfind(b"\n") + 1].splitlines():
                line = json.loads(text)
                facts = {name: value for name, value in line.items() if name != "chain"}
                before = lines[-1] if lines else None
                is_first = before is None and path.name != FILE  # earlier ones may be deleted
                expected = chained(before["chain"] if before is not None else "", facts)
                number = before["n"] + 1 if before is not None else line["n"]
                if wrong is None and ((not is_first and line["chain"] != expected) or line["n"] != number):
                    wrong = f"line {line['n']} of {path} does not follow from the one before: the record was changed"
                lines.append(line)
    except OSError as error:
        raise ClientError(Exit.STATE, f"{folder / FILE} cannot be read ({why(error)})") from None
    except (ValueError, KeyError, TypeError):
        raise ClientError(Exit.STATE, f"{path} is damaged: line {len(lines) + 1} cannot be read") from None
    return lines, wrong


def _about(path: str, body: Body | None, rounds: dict[str, tuple[int, str]]) -> Line:
    """What a message is, without its values."""
    place = path.partition("?")[0].split("/")
    facts: Line = {"what": MESSAGES.get(place[-1], place[-1])}
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
