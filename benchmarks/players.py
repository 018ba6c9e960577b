"""Clients for load on a coordinator: they answer every task at once, without data and training.

A player speaks over any connection, its own or one that it shares with others.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from promptfed.testing.clients import content_digest, enrolment, secret_of
from tests.support.coordinators import CoordinatorProcess

SHAPES = {32: (16, 512), 5120: (64, 20480)}  # KB: m and d_t of the float32 context that every update holds
EVALUATION = {"splits": {"test": {"accuracy": 0.5, "num_samples": 10}}}


class Connection:
    """One keep-alive HTTP/1.1 connection: no library in the way of what is measured."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, token: str, verb: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a request with this bearer token."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 16)
        reader, writer = self._streams
        lines = [f"{verb} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)  # in one call of the system, as gRPC's clients do
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answered = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        if answered.get("transfer-encoding") == "chunked":
            return int(head[0].split()[1]), answered, await read_chunks(reader)
        content = await reader.readexactly(int(answered.get("content-length", 0)))
        return int(head[0].split()[1]), answered, content

    async def expect(self, wanted: int, token: str, verb: str, path: str, body: object = None) -> bytes:
        """The body of an answer that must have the status ``wanted``; ``body`` is sent as JSON."""
        headers = {"Content_Type": "application/json"} if body is not None else {}
        sent = json.dumps(body).encode() if body is not None else b""
        status, _, content = await self.ask(token, verb, path, sent, **headers)
        if status != wanted:
            raise SystemExit(f"{verb} {path} is answered {status}: {content[:500]!r}")
        return content

    def close(self) -> None:
        """Hang up; the next request opens another connection."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks, as long reports come."""
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(chunks)


@dataclass
class Record:
    """What all players of a run have seen.

    ``spans`` are (round, time of the task, time of the 201); ``accepted`` seconds from an update's first byte to its
    201; ``too_many`` answers 503 to an update.
    """

    spans: list[tuple[int, float, float]] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    too_many: int = 0
    evaluations: int = 0

    def rounds(self) -> dict[int, list[tuple[float, float]]]:
        """Each round's spans."""
        spans: dict[int, list[tuple[float, float]]] = {}
        for number, begun, ended in self.spans:
            spans.setdefault(number, []).append((begun, ended))
        return spans

    def seconds(self) -> float:
        """Seconds of all rounds, each from its first task to its last 201."""
        return sum(max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in self.rounds().values())

    def whole_seconds(self) -> float:
        """Seconds from the first round's first task to the last round's last 201."""
        return max(ended for _, _, ended in self.spans) - min(begun for _, begun, _ in self.spans)


class Player:
    """A client of a federation whose updates have ``SHAPES[kilobytes]``."""

    def __init__(self, federation: str, number: int, kilobytes: int, record: Record):
        self.number, self.name = number, f"client-{number:05}"
        self.record, self._shape = record, SHAPES[kilobytes]
        self._secret, self._path = secret_of(self.name), f"/v1/federations/{federation}"
        self._content = content_of(kilobytes)

    async def enrol(self, http: Connection, token: str) -> None:
        body = enrolment(self.name, backbone_shape={"d_t": self._shape[1], "d_e": 8})
        await http.expect(201, token, "POST", f"{self._path}/clients", body)

    async def poll(self, http: Connection, seconds: int) -> tuple[int, dict[str, Any]]:
        """Ask for a task and wait for one so long: the status 200, 204 (none) or 410 (ended), and the task."""
        status, _, body = await http.ask(self._secret, "GET", f"{self._path}/task?wait={seconds}")
        if status not in (200, 204, 410):
            raise SystemExit(f"a poll is answered {status}: {body[:500]!r}")
        return status, json.loads(body) if status == 200 else {}

    async def answer(self, http: Connection, task: dict[str, Any]) -> None:
        """Fetch the payload, and send the update or the evaluation."""
        begun, path = time.perf_counter(), f"{self._path}/tasks/{task['task_id']}"
        payload = await http.expect(200, self._secret, "GET", f"{path}/payload")
        if len(payload) != task["payload"]["bytes"]:
            raise SystemExit("a payload is cut off")
        if task["kind"] == "train":
            ended = await self._send(http, f"{path}/update", task)
            self.record.spans.append((task["round"], begun, ended))
        else:
            await http.expect(201, self._secret, "PUT", f"{path}/evaluation", EVALUATION)
            self.record.evaluations += 1

    async def _send(self, http: Connection, path: str, task: dict[str, Any]) -> float:
        """Send the update until it is accepted; when that was."""
        update = self._update(task)
        digest = content_digest(update)
        while True:
            begun = time.perf_counter()
            status, headers, body = await http.ask(self._secret, "PUT", path, update, Content_Digest=digest)
            if status == 201:
                ended = time.perf_counter()
                self.record.accepted.append(ended - begun)
                return ended
            if status != 503:
                raise SystemExit(f"an update is answered {status}: {body[:500]!r}")
            self.record.too_many += 1
            await asyncio.sleep(float(headers["retry-after"]))

    def _update(self, task: dict[str, Any]) -> bytes:
        about = {"metrics": {"loss": 0.5}, "payload_sha256": task["payload"]["sha256"], "task_id": task["task_id"]}
        tensor = {"dtype": "F32", "shape": self._shape, "data_offsets": [0, len(self._content)]}
        header = json.dumps({"__metadata__": {"promptfed": json.dumps(about)}, "context": tensor}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + self._content


@cache
def content_of(kilobytes: int) -> bytes:
    """The context that every update of this size holds, made once."""
    return np.random.default_rng(0).standard_normal(SHAPES[kilobytes], dtype=np.float32).tobytes()


@dataclass
class Operator:
    """The operator of one federation, over a connection of its own."""

    port: int
    token: str
    federation: str = "load"

    def __post_init__(self) -> None:
        self._http, self._path = Connection(self.port), f"/v1/federations/{self.federation}"

    async def create(
        self, kilobytes: int, clients: int, rounds: int, *, deadline: float, fraction: float = 1.0, retention: str
    ) -> str:
        """An enrolment token of a new federation, which evaluates before the first and after the last round only."""
        asked = max(1, int(clients * fraction))
        spec = {
            "name": self.federation,
            "method": {"name": "promptfl", "m": SHAPES[kilobytes][0]},
            "rounds": rounds,
            "participation": {"min_clients": asked, "fraction": fraction, "deadline_seconds": deadline},
            "evaluation": {"every": rounds},
            "retention": retention,
        }
        await self._http.expect(201, self.token, "POST", "/v1/federations", spec)
        return str((await self._json(201, "POST", "/enrolment-tokens", {"uses": clients}))["token"])

    async def start(self) -> None:
        self._http.close()  # it may have been unused for longer than the coordinator keeps one
        await self._json(200, "POST", "/start")

    async def view(self, path: str = "") -> dict[str, Any]:
        """The federation, or what lies below it."""
        return await self._json(200, "GET", path)

    async def check_finished(self) -> None:
        """SystemExit where the federation has ended in another way."""
        self._http.close()
        state = (await self.view())["state"]
        if state != "finished":
            raise SystemExit(f"the federation is {state}")
        self._http.close()

    async def _json(self, wanted: int, verb: str, path: str, body: object = None) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(await self._http.expect(wanted, self.token, verb, self._path + path, body))
        return content


def operator_of(process: CoordinatorProcess, federation: str = "load") -> Operator:
    """The operator of a federation at this coordinator."""
    token = process.operator["Authorization"].removeprefix("Bearer ")
    return Operator(int(process.url.rsplit(":", 1)[1]), token, federation)


async def each_over(
    connections: Sequence[Connection], players: Iterable[Player], work: Callable[[Player, Connection], Awaitable[None]]
) -> None:
    """``work`` for each player, each over the next free connection."""
    left = iter(players)

    async def take(connection: Connection) -> None:
        for player in left:
            await work(player, connection)

    await asyncio.gather(*(take(connection) for connection in connections))
