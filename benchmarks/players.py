"""Clients that put load on a coordinator: they answer every task at once, without data and training.

A player is given a connection for each request, so several players can share one.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from promptfed.shared.spec.section import PROTOCOL, VERSION
from promptfed.testing.clients import content_digest, enrolment, secret_of
from tests.support.coordinators import CoordinatorProcess

SHAPES = {1: (1, 256), 32: (16, 512), 5120: (64, 20480)}  # KB: m and d_t of the float32 context that every update holds
EVALUATION = {"splits": {"test": {"accuracy": 0.5, "num_samples": 10}}}


class Connection:
    """A keep-alive HTTP/1.1 connection. It uses no HTTP library, whose CPU time would disturb the measurement."""

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
        lines = [
            f"{verb} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {token}",
            f"{PROTOCOL}: {VERSION}",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)  # one system call, as in gRPC clients
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        received = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        if received.get("transfer-encoding") == "chunked":
            return int(head[0].split()[1]), received, await read_chunks(reader)
        content = await reader.readexactly(int(received.get("content-length", 0)))
        return int(head[0].split()[1]), received, content

    async def expect(self, wanted: int, token: str, verb: str, path: str, body: object = None) -> bytes:
        """Send ``body`` as JSON; the answer's body. SystemExit for another status than ``wanted``."""
        headers = {"Content_Type": "application/json"} if body is not None else {}
        sent = json.dumps(body).encode() if body is not None else b""
        status, _, content = await self.ask(token, verb, path, sent, **headers)
        if status != wanted:
            raise SystemExit(f"{verb} {path} is answered {status}: {content[:500]!r}")
        return content

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer with chunked transfer encoding."""
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(chunks)


@dataclass
class Record:
    """What all players of a run have measured.

    ``spans``: round, time of the task and time of the 201 of each update. ``accepted``: seconds from the first byte of
    an update to its 201. ``too_many``: number of answers 503 to an update.
    """

    spans: list[tuple[int, float, float]] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    too_many: int = 0

    def rounds(self) -> dict[int, list[tuple[float, float]]]:
        """Times of the task and of the 201 of each update, by round."""
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
    """A client of a federation. Its updates have the shape ``SHAPES[kilobytes]``."""

    def __init__(self, federation: str, number: int, kilobytes: int, record: Record):
        self.number, self.name = number, f"client-{number:05}"
        self.record, self._shape = record, SHAPES[kilobytes]
        self._secret, self._path = secret_of(self.name), f"/v1/federations/{federation}"
        self._change = change_of(kilobytes)

    async def enrol(self, http: Connection, token: str) -> None:
        body = enrolment(self.name, backbone_shape={"d_t": self._shape[1], "d_e": 8})
        await http.expect(201, token, "POST", f"{self._path}/clients", body)

    async def poll(self, http: Connection, seconds: int) -> tuple[int, dict[str, Any]]:
        """Wait at most ``seconds`` for a task: the status 200, 204 (no task) or 410 (ended), and the task."""
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
            ended = await self._send(http, f"{path}/update", task, payload)
            self.record.spans.append((task["round"], begun, ended))
        else:
            await http.expect(201, self._secret, "PUT", f"{path}/evaluation", EVALUATION)

    async def _send(self, http: Connection, path: str, task: dict[str, Any], payload: bytes) -> float:
        """Send the update until it is accepted; the time of the 201."""
        update = self._update(task, payload)
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

    def _update(self, task: dict[str, Any], payload: bytes) -> bytes:
        # The same change from whatever was received: from a fixed place, late ones would swing ever further.
        content = (self._change + np.frombuffer(payload[-self._change.nbytes :], np.float32)).tobytes()
        about = {"metrics": {"loss": 0.5}, "payload_sha256": task["payload"]["sha256"], "task_id": task["task_id"]}
        tensor = {"dtype": "F32", "shape": self._shape, "data_offsets": [0, len(content)]}
        header = json.dumps({"__metadata__": {"promptfed": json.dumps(about)}, "context": tensor}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + content


@cache
def change_of(kilobytes: int) -> np.ndarray:
    """The change of every update of this size."""
    change: np.ndarray = 1e-3 * np.random.default_rng(0).standard_normal(SHAPES[kilobytes], dtype=np.float32)
    return change.reshape(-1)


@dataclass
class Operator:
    """The operator of one federation, with its own connection."""

    port: int
    token: str
    federation: str = "load"

    def __post_init__(self) -> None:
        self._http, self._path = Connection(self.port), f"/v1/federations/{self.federation}"

    async def create(
        self,
        kilobytes: int,
        clients: int,
        rounds: int,
        *,
        deadline: float,
        retention: str,
    ) -> str:
        """Create the federation; its enrolment token. It evaluates only before and after all rounds."""
        spec = {
            "name": self.federation,
            "method": {"name": "promptfl", "m": SHAPES[kilobytes][0]},
            "rounds": rounds,
            "participation": {"min_clients": clients, "deadline_seconds": deadline},
            "evaluation": {"every": rounds},
            "retention": retention,
        }
        await self._http.expect(201, self.token, "POST", "/v1/federations", spec)
        return str((await self._json(201, "POST", "/enrolment-tokens", {"uses": clients}))["token"])

    async def start(self) -> None:
        self._http.close()  # it may be idle for longer than the coordinator keeps a connection
        await self._json(200, "POST", "/start")

    async def view(self, path: str = "") -> dict[str, Any]:
        """The federation as the coordinator shows it, or the resource ``path`` below it."""
        return await self._json(200, "GET", path)

    async def check_finished(self) -> None:
        """SystemExit unless the federation has finished."""
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
