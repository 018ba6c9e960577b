"""How many updates a coordinator takes from clients that enrol, poll, fetch payloads and send updates without training.

Each case has its own coordinator process with real HTTP. This process plays all clients, each over its own keep-alive
connection, as a real client: a small payload comes within the task, and the receipt of a small update contains the
next task. All get their tasks at the same moment and send an update of the given size, so each round is a burst.

    python -m benchmarks.coordinator_load --json load.json
    python -m benchmarks.coordinator_load --cases 32:100 --databases sqlite
    python -m benchmarks.coordinator_load --beside flower --repeat 3 --json load.json

With ``--beside flower``, after each case as many clients send updates of the same size to Flower's in-memory gRPC
server (``benchmarks/flower/server.py``). ``--flower-python`` is a Python with flwr; by default one is made in a
temporary folder, from the package index.

- updates/s of the whole run: from the first round's beginning to the last one's end, and of the rounds: over the sum of
  their times, as the coordinator reports them. Answers 503 (too many uploads at once) are counted separately; a client
  waits as long as ``Retry-After`` says.
- CPU per update: CPU time of the coordinator process in all rounds, over all updates.
- peak: the largest memory of the coordinator process (VmHWM); in brackets, that before the first enrolment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.flower import beside
from benchmarks.flower.beside import ROUNDS, SHAPES
from benchmarks.harness import (
    allow_many_connections,
    coordinator,
    cpu_seconds_of,
    machine,
    parser,
    peak_mb,
    table,
    write,
)
from promptfed.shared.messages import INLINE_BYTES
from promptfed.shared.versions import PROTOCOL, VERSION
from promptfed.testing.clients import content_digest, enrolment, secret_of
from tests.support.coordinators import CoordinatorProcess
from tests.support.postgres import PostgresServer

CASES = ((32, 10), (32, 100), (32, 1000), (5120, 10), (5120, 100))
ENROLLING = 100  # clients that enrol at once
WHOLE_SECONDS = 300.0


FEDERATION = "load"
PATH = f"/v1/federations/{FEDERATION}"
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
    """What all players of a run have counted: accepted updates, and answers 503 to one."""

    updates: int = 0
    too_many: int = 0


def seconds_of(phases: Sequence[Any]) -> tuple[float, float]:
    """Seconds of the training phases, and those from the first one's beginning to the last one's end."""
    whole = phases[-1]["closed_at"], phases[0]["opened_at"]
    end, begin = (datetime.fromisoformat(text).timestamp() for text in whole)
    return sum(phase["seconds"] for phase in phases), end - begin


class LoadClient:
    """A client that waits for tasks on its own connection. Its updates have the shape ``SHAPES[kilobytes]``."""

    def __init__(self, port: int, number: int, kilobytes: int, record: Record):
        self.name, self.record, self._shape = f"client-{number:05}", record, SHAPES[kilobytes]
        self.http, self._secret, self._change = Connection(port), secret_of(self.name), change_of(kilobytes)

    async def enrol(self, http: Connection, token: str) -> None:
        body = enrolment(self.name, backbone_shape={"d_t": self._shape[1], "d_e": 8})
        await http.expect(201, token, "POST", f"{PATH}/clients", body)

    async def work(self) -> None:
        """Answer tasks until the federation has ended."""
        task = await self.next_task()
        while task is not None:
            task = await self.answer(task) or await self.next_task()
        self.http.close()

    async def next_task(self) -> dict[str, Any] | None:
        """The next task; None once the federation has ended."""
        while True:
            status, _, body = await self.http.ask(self._secret, "GET", f"{PATH}/task?wait=30&inline=true")
            if status not in (200, 204, 410):
                raise SystemExit(f"a poll is answered {status}: {body[:500]!r}")
            if status != 204:
                return dict(json.loads(body)) if status == 200 else None

    async def answer(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """Take the payload, and send the update or the evaluation; the next task, if the answer has brought it."""
        path = f"{PATH}/tasks/{task['task_id']}"
        if (data := task["payload"].get("data")) is not None:
            payload = b64decode(data)
        else:
            payload = await self.http.expect(200, self._secret, "GET", f"{path}/payload")
        if len(payload) != task["payload"]["bytes"]:
            raise SystemExit("a payload is cut off")
        if task["kind"] == "train":
            return await self._send(path, task, payload)
        receipt = await self.http.expect(201, self._secret, "PUT", f"{path}/evaluation?next=30", EVALUATION)
        return _next(receipt)

    async def _send(self, path: str, task: dict[str, Any], payload: bytes) -> dict[str, Any] | None:
        """Send the update until it is accepted; the next task."""
        update = self._update(task, payload)
        digest = content_digest(update)
        url = f"{path}/update" + ("?next=30" if len(update) <= INLINE_BYTES else "")
        while True:
            status, headers, body = await self.http.ask(self._secret, "PUT", url, update, Content_Digest=digest)
            if status == 201:
                self.record.updates += 1
                return _next(body)
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


def _next(receipt: bytes) -> dict[str, Any] | None:
    task: dict[str, Any] | None = json.loads(receipt).get("next")
    return task


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

    def __post_init__(self) -> None:
        self._http = Connection(self.port)

    async def create(self, kilobytes: int, clients: int) -> str:
        """Create the federation; its enrolment token. It evaluates only before and after all rounds."""
        spec = {
            "name": FEDERATION,
            "method": {"name": "promptfl", "m": SHAPES[kilobytes][0]},
            "rounds": ROUNDS[clients],
            "participation": {"min_clients": clients, "deadline_seconds": 600},
            "evaluation": {"every": ROUNDS[clients]},
            "retention": "last_round",
        }
        await self._http.expect(201, self.token, "POST", "/v1/federations", spec)
        return str((await self._json(201, "POST", "/enrolment-tokens", {"uses": clients}))["token"])

    async def start(self) -> None:
        self._http.close()  # it may be idle for longer than the coordinator keeps a connection
        await self._json(200, "POST", "/start")

    async def phases(self) -> list[Any]:
        """The reports of all training phases. SystemExit unless the federation has finished."""
        self._http.close()
        state = (await self._json(200, "GET", ""))["state"]
        reports = (await self._json(200, "GET", "/rounds"))["rounds"]
        self._http.close()
        if state != "finished":
            raise SystemExit(f"the federation is {state}")
        return [phase for report in reports for phase in report["phases"]]

    async def _json(self, wanted: int, verb: str, path: str, body: object = None) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(await self._http.expect(wanted, self.token, verb, PATH + path, body))
        return content


def operator_of(process: CoordinatorProcess) -> Operator:
    """The operator at this coordinator."""
    token = process.operator["Authorization"].removeprefix("Bearer ")
    return Operator(int(process.url.rsplit(":", 1)[1]), token)


async def play(
    operator: Operator,
    token: str,
    clients: Sequence[LoadClient],
    seconds: float,
    watch: Callable[[], Awaitable[None]] | None = None,
) -> tuple[float, list[Any]]:
    """Play a whole federation; seconds of the enrolments, and reports of the phases. ``watch`` runs meanwhile.

    Raises:
        TimeoutError: the rounds took longer than ``seconds``.
    """
    places = asyncio.Semaphore(ENROLLING)

    async def enrol(client: LoadClient) -> None:
        async with places:
            http = Connection(operator.port)
            await client.enrol(http, token)
            http.close()

    started = time.perf_counter()
    await asyncio.gather(*(enrol(client) for client in clients))
    enrolled = time.perf_counter()
    working = asyncio.gather(*(client.work() for client in clients))
    await operator.start()
    async with asyncio.timeout(seconds):
        await asyncio.gather(working, *([watch()] if watch else []))
    return enrolled - started, await operator.phases()


def measure(options: Sequence[str], size: int, count: int) -> dict[str, Any]:
    """Measure ``count`` clients with updates of ``size`` KB at a coordinator with the command-line ``options``."""
    record = Record()
    with coordinator(*options) as process:
        idle = peak_mb(process.pid)
        operator = operator_of(process)
        cpu: list[float] = []

        async def note_cpu() -> None:
            cpu.append(cpu_seconds_of(process.pid))

        async def burst() -> tuple[float, list[Any]]:
            token = await operator.create(size, count)
            clients = [LoadClient(operator.port, number, size, record) for number in range(count)]
            played = await play(operator, token, clients, WHOLE_SECONDS, note_cpu)
            await note_cpu()
            return played

        enrolling, phases = asyncio.run(burst())
        seconds, whole = seconds_of(phases)
        peak = peak_mb(process.pid)
    return {
        "kilobytes": size,
        "clients": count,
        "updates": record.updates,
        "updates_per_second": record.updates / seconds,
        "whole_run_updates_per_second": record.updates / whole,
        "cpu_ms_per_update": (cpu[1] - cpu[0]) / record.updates * 1e3,
        "too_many_uploads": record.too_many,
        "enrolments_per_second": count / enrolling,
        "idle_mb": idle,
        "peak_mb": peak,
    }


def measure_on_postgres(server: PostgresServer, size: int, count: int) -> dict[str, Any]:
    """Measure a case on a new database of the server."""
    return measure(["--database-url", server.schema()], size, count)


def parse_cases(text: str) -> list[tuple[int, int]]:
    """The kilobytes and clients of ``32:10,5120:100``."""
    cases = [(int(size), int(count)) for size, _, count in (case.partition(":") for case in text.split(","))]
    for size, count in cases:
        if size not in SHAPES or count not in ROUNDS:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB), numbers of clients {list(ROUNDS)}")
    return cases


def medians(cases: Sequence[dict[str, Any]]) -> str:
    """A table with the run of median updates/s of each case; Flower has no enrolments."""
    figures = (
        "whole_run_updates_per_second",
        "updates_per_second",
        "cpu_ms_per_update",
        "enrolments_per_second",
        "idle_mb",
        "peak_mb",
    )
    repeats: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for case in cases:
        repeats.setdefault((case["database"], case["kilobytes"], case["clients"]), []).append(case)
    rows = []
    for (database, size, count), runs in repeats.items():
        typical = sorted(runs, key=lambda run: run["updates_per_second"])[len(runs) // 2]
        cells = [f"{typical[name]:,.1f}" if name in typical else "" for name in figures]
        rows.append([database, f"{size:,}", f"{count:,}", *cells])
    return table(["server", "KB", "clients", *figures], rows)


def main() -> None:
    """Run all cases on all servers in turn, and print a table."""
    command = parser(__doc__)
    command.add_argument("--cases", type=parse_cases, default=CASES, help="KB:clients, separated by commas")
    command.add_argument("--databases", default="sqlite,postgresql")
    command.add_argument(
        "--repeat", type=int, default=1, help="runs of each case; that with the median updates/s is shown"
    )
    command.add_argument("--beside", choices=["flower"], help="measure another server too")
    command.add_argument("--flower-python", help="a Python with flwr; default: one is made for the run")
    options = command.parse_args()
    allow_many_connections()
    numbers: dict[str, Any] = {"machine": machine(), "cases": []}
    with contextlib.ExitStack() as stack:
        servers: dict[str, Callable[[int, int], dict[str, Any]]] = {}
        for database in options.databases.split(","):
            servers[database] = partial(measure, [])
            if database == "postgresql":
                postgres = PostgresServer(fsync=True)
                stack.callback(postgres.remove)
                servers[database] = partial(measure_on_postgres, postgres)
        if options.beside:
            python = options.flower_python or stack.enter_context(beside.own_python())
            servers |= {name: partial(beside.measure, python, name) for name in beside.CLIENTS}
        for (size, count), _, (name, case) in product(options.cases, range(options.repeat), servers.items()):
            if name not in beside.CLIENTS or beside.compares(name, size, count):
                numbers["cases"].append({"database": name} | case(size, count))
                print(json.dumps(numbers["cases"][-1]), file=sys.stderr, flush=True)
    print(medians(numbers["cases"]))
    write(options.json, numbers)


if __name__ == "__main__":
    main()
