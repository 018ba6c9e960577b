"""How many updates a coordinator takes: real process, real HTTP, clients that enrol, poll, fetch and send, never train.

One coordinator process per case; this process plays all clients over one keep-alive connection each. All of them get
their tasks at the same moment, fetch the payload and send an update of the wanted size: each round is a burst.

    python -m benchmarks.coordinator_load --json load.json
    python -m benchmarks.coordinator_load --cases 32:100 --databases sqlite

- updates/s: updates accepted in all training rounds, over the time from a round's first poll answered to its last 201.
- p50, p99: from sending an update's first byte to its 201. A 503 before it (too many uploads at once) is not in it but
  counted; the client waits as long as ``Retry-After`` says.
- peak: the most memory that the coordinator process ever had (VmHWM), and how much of it before anybody enrolled.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import parser, table, write
from tests.support.coordinators import CoordinatorProcess
from tests.support.postgres import PostgresServer

SHAPES = {32: (16, 512), 5120: (64, 20480)}  # KB: m and d_t of a float32 context
CASES = ((32, 10), (32, 100), (32, 1000), (5120, 10), (5120, 100))
ROUNDS = {10: 20, 100: 5, 1000: 2}
FINGERPRINT = "sha256:" + "ab" * 32
ENROLLING = 20  # at once
WHOLE_SECONDS = 300.0


class Connection:
    """One keep-alive HTTP/1.1 connection: no library in the way of what is measured."""

    def __init__(self, port: int, token: str):
        self._port = port
        self._token = token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, verb: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 16)
        reader, writer = self._streams
        lines = [f"{verb} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {self._token}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode())
        writer.write(body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answered = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        content = await reader.readexactly(int(answered.get("content-length", 0)))
        return int(head[0].split()[1]), answered, content

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


@dataclass
class Record:
    """What all clients of a case have seen. ``spans`` are (round, first poll answered, 201)."""

    spans: list[tuple[int, float, float]] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    too_many: int = 0


class LoadClient:
    """A client without data: it answers every task at once."""

    def __init__(self, port: int, name: str, content: bytes, shape: tuple[int, int], record: Record):
        self.name = name
        self._secret = hashlib.sha256(name.encode()).hexdigest()
        self._http = Connection(port, self._secret)
        self._port = port
        self._content = content
        self._shape = shape
        self._record = record

    async def enrol(self, token: str) -> None:
        """Enrol with a secret of its own."""
        body = {
            "name": self.name,
            "secret": self._secret,
            "num_samples": 10,
            "class_names": ["circle", "square"],
            "backbone_fingerprint": FINGERPRINT,
            "backbone_shape": {"d_t": self._shape[1], "d_e": 8},
        }
        http = Connection(self._port, token)
        await expect(http, 201, "POST", "/v1/federations/load/clients", json.dumps(body).encode())
        http.close()

    async def work(self) -> None:
        """Answer tasks until the federation has ended."""
        while (task := await self.next_task()) is not None:
            await self._carry_out(task)
        self._http.close()

    async def next_task(self) -> dict[str, Any] | None:
        """The next task, waited for; None once the federation has ended."""
        while True:
            status, _, body = await self.poll(30)
            if status == 410:
                return None
            if status == 200:
                task: dict[str, Any] = json.loads(body)
                return task
            if status != 204:
                raise SystemExit(f"a poll is answered {status}: {body[:500]!r}")

    async def poll(self, seconds: int) -> tuple[int, dict[str, str], bytes]:
        """Ask for the open task, and wait for one so long."""
        return await self._http.ask("GET", f"/v1/federations/load/task?wait={seconds}")

    async def _carry_out(self, task: dict[str, Any]) -> None:
        begun = time.perf_counter()
        path = f"/v1/federations/load/tasks/{task['task_id']}"
        payload = await expect(self._http, 200, "GET", f"{path}/payload")
        if len(payload) != task["payload"]["bytes"]:
            raise SystemExit("a payload is cut off")
        if task["kind"] == "train":
            self._record.spans.append((task["round"], begun, await self._send(f"{path}/update", task)))
        else:
            result = {"splits": {"test": {"accuracy": 0.5, "num_samples": 10}}}
            await expect(self._http, 201, "PUT", f"{path}/evaluation", json.dumps(result).encode())

    async def _send(self, path: str, task: dict[str, Any]) -> float:
        """Send the update until it is accepted; when that was."""
        update = self._update(task)
        digest = base64.b64encode(hashlib.sha256(update).digest()).decode()
        while True:
            begun = time.perf_counter()
            status, headers, body = await self._http.ask("PUT", path, update, Content_Digest=f"sha-256=:{digest}:")
            if status == 201:
                ended = time.perf_counter()
                self._record.accepted.append(ended - begun)
                return ended
            if status != 503:
                raise SystemExit(f"an update is answered {status}: {body[:500]!r}")
            self._record.too_many += 1
            await asyncio.sleep(float(headers["retry-after"]))

    def _update(self, task: dict[str, Any]) -> bytes:
        about = {"metrics": {"loss": 0.5}, "payload_sha256": task["payload"]["sha256"], "task_id": task["task_id"]}
        tensor = {"dtype": "F32", "shape": self._shape, "data_offsets": [0, len(self._content)]}
        header = json.dumps({"__metadata__": {"promptfed": json.dumps(about)}, "context": tensor}).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + self._content


async def expect(http: Connection, wanted: int, verb: str, path: str, body: bytes = b"") -> bytes:
    """The body of an answer that must be ``wanted``."""
    status, _, content = await http.ask(verb, path, body, **({"Content_Type": "application/json"} if body else {}))
    if status != wanted:
        raise SystemExit(f"{verb} {path} is answered {status}: {content[:500]!r}")
    return content


@contextlib.contextmanager
def coordinator(folder: Path, options: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """A coordinator process on ``folder / "data"``: its port and its process id."""
    process = CoordinatorProcess(folder / "data", *options)
    try:
        if process.dead:
            raise SystemExit(process.log())
        yield int(process.url.rsplit(":", 1)[1]), process.pid
    finally:
        process.signal(signal.SIGTERM)
        process.wait()


@dataclass
class Footprint:
    """What the coordinator holds at a moment, in MB and files; ``peak_mb`` is the most memory so far."""

    resident_mb: float
    peak_mb: float
    open_files: int


def footprint(pid: int) -> Footprint:
    """Of the coordinator's process."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    megabytes = {key: int(value.split()[0]) / 1024 for key, _, value in lines if key in ("VmRSS", "VmHWM")}
    return Footprint(megabytes["VmRSS"], megabytes["VmHWM"], len(list(Path(f"/proc/{pid}/fd").iterdir())))


def load_spec(kilobytes: int, clients: int, rounds: int, retention: str, deadline: float) -> dict[str, Any]:
    """Of the federation ``load``: evaluated before the first and after the last round only."""
    return {
        "name": "load",
        "method": {"name": "promptfl", "m": SHAPES[kilobytes][0]},
        "rounds": rounds,
        "participation": {"min_clients": clients, "deadline_seconds": deadline},
        "evaluation": {"every": rounds},
        "retention": retention,
    }


def content_of(kilobytes: int) -> bytes:
    """The context that every update holds."""
    return np.random.default_rng(0).standard_normal(SHAPES[kilobytes], dtype=np.float32).tobytes()


async def play(
    http: Connection,
    spec: dict[str, Any],
    clients: Sequence[LoadClient],
    seconds: float,
    watch: Callable[[], Awaitable[None]] | None = None,
) -> tuple[float, float]:
    """A whole federation, in at most ``seconds``; how long enrolling took, and how long the rounds."""
    await expect(http, 201, "POST", "/v1/federations", json.dumps(spec).encode())
    asked = json.dumps({"uses": len(clients)}).encode()
    token = json.loads(await expect(http, 201, "POST", "/v1/federations/load/enrolment-tokens", asked))["token"]
    begun = time.perf_counter()
    for start in range(0, len(clients), ENROLLING):
        await asyncio.gather(*(client.enrol(token) for client in clients[start : start + ENROLLING]))
    enrolled = time.perf_counter()
    working = asyncio.gather(*(client.work() for client in clients))
    await expect(http, 200, "POST", "/v1/federations/load/start")
    async with asyncio.timeout(seconds):
        await asyncio.gather(working, *([watch()] if watch else []))
    ended = time.perf_counter()
    state = json.loads(await expect(http, 200, "GET", "/v1/federations/load"))["state"]
    if state != "finished":
        raise SystemExit(f"the federation is {state}")
    return enrolled - begun, ended - enrolled


async def burst(port: int, operator: str, kilobytes: int, count: int, record: Record) -> float:
    """A federation of ``count`` clients; seconds that enrolling took."""
    http, content = Connection(port, operator), content_of(kilobytes)
    clients = [LoadClient(port, f"client-{k:04}", content, SHAPES[kilobytes], record) for k in range(count)]
    spec = load_spec(kilobytes, count, ROUNDS[count], "last_round", 600)
    enrolling, _ = await play(http, spec, clients, WHOLE_SECONDS)
    http.close()
    return enrolling


def measure(database: str, options: list[str], size: int, count: int) -> dict[str, Any]:
    """One case."""
    record = Record()
    with (
        tempfile.TemporaryDirectory(prefix="promptfed-load-") as folder,
        coordinator(Path(folder), options) as (port, pid),
    ):
        idle = footprint(pid).peak_mb
        operator = (Path(folder) / "data" / "operator.token").read_text().strip()
        enrolling = asyncio.run(burst(port, operator, size, count, record))
        peak = footprint(pid).peak_mb
    rounds = {number for number, _, _ in record.spans}
    seconds = sum(
        max(end for k, _, end in record.spans if k == round) - min(begun for k, begun, _ in record.spans if k == round)
        for round in rounds
    )
    latencies = np.array(record.accepted)
    return {
        "database": database,
        "kilobytes": size,
        "clients": count,
        "updates": len(latencies),
        "updates_per_second": len(latencies) / seconds,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "too_many_uploads": record.too_many,
        "enrolments_per_second": count / enrolling,
        "idle_mb": idle,
        "peak_mb": peak,
    }


def update_size(kilobytes: int) -> str:
    """As a table shows it."""
    return f"{kilobytes} KB" if kilobytes < 1024 else f"{kilobytes // 1024} MB"


def markdown(cases: list[dict[str, Any]]) -> str:
    """The table of the cases."""
    columns = ["database", "update", "clients", "updates/s", "p50", "p99", "503s per update", "peak memory (idle)"]
    rows = []
    for case in cases:
        cells = [case["database"], update_size(case["kilobytes"]), f"{case['clients']:,}"]
        cells += [f"{case['updates_per_second']:.0f}", f"{case['p50_ms']:.0f} ms", f"{case['p99_ms']:.0f} ms"]
        cells.append(f"{case['too_many_uploads'] / case['updates']:.2f}")
        rows.append([*cells, f"{case['peak_mb']:.0f} MB ({case['idle_mb']:.0f})"])
    return table(columns, rows)


def allow_many_connections() -> None:
    """As many open files as the system lets us have; and SIGTERM ends what was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def parse_cases(text: str) -> list[tuple[int, int]]:
    """``32:10,5120:100`` as pairs of kilobytes and clients."""
    cases = [(int(size), int(count)) for size, _, count in (case.partition(":") for case in text.split(","))]
    for size, count in cases:
        if size not in SHAPES or count not in ROUNDS:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB), numbers of clients {list(ROUNDS)}")
    return cases


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--cases", type=parse_cases, default=CASES, help="KB:clients, with commas between")
    command.add_argument("--databases", default="sqlite,postgresql")
    command.add_argument("--repeat", type=int, default=1, help="the case with the median updates/s is shown")
    options = command.parse_args()
    allow_many_connections()
    rows, shown = [], []
    with contextlib.ExitStack() as stack:
        server = None
        if "postgresql" in options.databases:
            server = PostgresServer(fsync=True)
            stack.callback(server.remove)
        for size, count in options.cases:
            for database in options.databases.split(","):
                runs = []
                for _ in range(options.repeat):
                    where = ["--database-url", server.schema()] if server and database == "postgresql" else []
                    runs.append(measure(database, where, size, count))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                rows += runs
                shown.append(sorted(runs, key=lambda run: run["updates_per_second"])[len(runs) // 2])
    print(markdown(shown))
    write(options.json, rows, indent=2)


if __name__ == "__main__":
    main()
