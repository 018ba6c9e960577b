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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.postgres import PostgresServer

SHAPES = {32: (16, 512), 5120: (64, 20480)}  # KB: m and d_t of a float32 context
CASES = ((32, 10), (32, 100), (32, 1000), (5120, 10), (5120, 100))
ROUNDS = {10: 20, 100: 5, 1000: 2}
FINGERPRINT = "sha256:" + "ab" * 32
START_SECONDS = 60.0
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
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        content = await reader.readexactly(int(found.get("content-length", 0)))
        return int(head[0].split()[1]), found, content

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
                found: dict[str, Any] = json.loads(body)
                return found
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
def coordinator(folder: Path, options: list[str]) -> Iterator[tuple[int, int]]:
    """A coordinator process: its port and its process id."""
    port_file = folder / "url"
    command = [sys.executable, "-m", "promptfed.coordinator", "--data-dir", str(folder / "data"), "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--port-file", str(port_file), *options], stdout=log, stderr=log)  # noqa: S603
    try:
        end = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.02)
        yield int(port_file.read_text().rsplit(":", 1)[1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def peak_megabytes(pid: int) -> float:
    """The most resident memory that the process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not tell a process's peak memory")


async def play(port: int, operator: str, size: int, count: int, record: Record) -> float:
    """A whole federation of ``count`` clients; seconds that enrolling took."""
    shape = SHAPES[size]
    content = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).tobytes()
    http = Connection(port, operator)
    rounds = ROUNDS[count]
    spec = {
        "name": "load",
        "method": {"name": "promptfl", "m": shape[0]},
        "rounds": rounds,
        "participation": {"min_clients": count, "deadline_seconds": 600},
        "evaluation": {"every": rounds},
        "retention": "last_round",
    }
    await expect(http, 201, "POST", "/v1/federations", json.dumps(spec).encode())
    token = json.loads(await expect(http, 201, "POST", "/v1/federations/load/enrolment-tokens"))["token"]
    clients = [LoadClient(port, f"client-{number:04}", content, shape, record) for number in range(count)]
    begun = time.perf_counter()
    for start in range(0, count, 20):
        await asyncio.gather(*(client.enrol(token) for client in clients[start : start + 20]))
    enrolling = time.perf_counter() - begun
    working = asyncio.gather(*(client.work() for client in clients))
    await expect(http, 200, "POST", "/v1/federations/load/start")
    await asyncio.wait_for(working, WHOLE_SECONDS)
    state = json.loads(await expect(http, 200, "GET", "/v1/federations/load"))["state"]
    http.close()
    if state != "finished":
        raise SystemExit(f"the federation is {state}")
    return enrolling


def measure(database: str, options: list[str], size: int, count: int) -> dict[str, Any]:
    """One case."""
    record = Record()
    with (
        tempfile.TemporaryDirectory(prefix="promptfed-load-") as folder,
        coordinator(Path(folder), options) as (port, pid),
    ):
        idle = peak_megabytes(pid)
        operator = (Path(folder) / "data" / "operator.token").read_text().strip()
        enrolling = asyncio.run(play(port, operator, size, count, record))
        peak = peak_megabytes(pid)
    rounds = {number for number, _, _ in record.spans}
    seconds = sum(
        max(end for number, _, end in record.spans if number == one) - min(b for n, b, _ in record.spans if n == one)
        for one in rounds
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


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| database | update | clients | updates/s | p50 | p99 | 503s per update | peak memory (idle) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        size = f"{row['kilobytes']} KB" if row["kilobytes"] < 1024 else f"{row['kilobytes'] // 1024} MB"
        cells = [row["database"], size, f"{row['clients']:,}", f"{row['updates_per_second']:.0f}"]
        cells += [f"{row['p50_ms']:.0f} ms", f"{row['p99_ms']:.0f} ms"]
        cells += [f"{row['too_many_uploads'] / row['updates']:.2f}", f"{row['peak_mb']:.0f} MB ({row['idle_mb']:.0f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_cases(text: str) -> list[tuple[int, int]]:
    """``32:10,5120:100`` as pairs of kilobytes and clients."""
    cases = [(int(size), int(count)) for size, _, count in (one.partition(":") for one in text.split(","))]
    for size, count in cases:
        if size not in SHAPES or count not in ROUNDS:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB), numbers of clients {list(ROUNDS)}")
    return cases


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=parse_cases, default=CASES, help="KB:clients, with commas between")
    parser.add_argument("--databases", default="sqlite,postgresql")
    parser.add_argument("--repeat", type=int, default=1, help="the case with the median updates/s is shown")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows, shown = [], []
    with contextlib.ExitStack() as stack:
        server = None
        if "postgresql" in given.databases:
            server = PostgresServer(fsync=True)
            stack.callback(server.remove)
        for size, count in given.cases:
            for database in given.databases.split(","):
                runs = []
                for _ in range(given.repeat):
                    options = ["--database-url", server.schema()] if server and database == "postgresql" else []
                    runs.append(measure(database, options, size, count))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                rows += runs
                shown.append(sorted(runs, key=lambda one: one["updates_per_second"])[len(runs) // 2])
    print(table(shown))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
