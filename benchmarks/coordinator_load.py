"""How many updates a coordinator takes from clients that enrol, poll, fetch payloads and send updates without training.

Each case has its own coordinator process with real HTTP. This process plays all clients, each over its own keep-alive
connection. All get their tasks at the same moment, fetch the payload and send an update of the given size, so each
round is a burst.

    python -m benchmarks.coordinator_load --json load.json
    python -m benchmarks.coordinator_load --cases 32:100 --databases sqlite
    python -m benchmarks.coordinator_load --beside flower --repeat 3 --json load.json

With ``--beside flower``, after each case as many clients send updates of the same size to Flower's in-memory gRPC
server (``benchmarks/flower/server.py``). ``--flower-python`` is a Python with flwr; by default one is made in a
temporary folder, from the package index.

- updates/s: accepted updates of all training rounds, over the sum of the rounds' times from the first task to the last
  201.
- p50, p99: from the first byte of an update to its 201. Answers 503 (too many uploads at once) are counted separately;
  the client waits as long as ``Retry-After`` says.
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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.flower import beside
from benchmarks.flower.beside import ROUNDS
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
from benchmarks.players import SHAPES, Connection, Operator, Player, Record, operator_of
from tests.support.postgres import PostgresServer

CASES = ((32, 10), (32, 100), (32, 1000), (5120, 10), (5120, 100))
ENROLLING = 100  # clients that enrol at once
WHOLE_SECONDS = 300.0


class LoadClient(Player):
    """A player that waits for tasks on its own connection."""

    def __init__(self, port: int, number: int, kilobytes: int, record: Record):
        super().__init__("load", number, kilobytes, record)
        self.http = Connection(port)

    async def work(self) -> None:
        """Answer tasks until the federation has ended."""
        while (task := await self.next_task()) is not None:
            await self.answer(self.http, task)
        self.http.close()

    async def next_task(self) -> dict[str, Any] | None:
        """The next task; None once the federation has ended."""
        while True:
            status, task = await self.poll(self.http, 30)
            if status != 204:
                return task if status == 200 else None


async def play(
    operator: Operator,
    token: str,
    clients: Sequence[LoadClient],
    seconds: float,
    watch: Callable[[], Awaitable[None]] | None = None,
) -> tuple[float, float]:
    """Play a whole federation; seconds of the enrolments and of the rounds. ``watch`` runs during the rounds.

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
    ended = time.perf_counter()
    await operator.check_finished()
    return enrolled - started, ended - enrolled


def measure(options: Sequence[str], size: int, count: int) -> dict[str, Any]:
    """Measure ``count`` clients with updates of ``size`` KB at a coordinator with the command-line ``options``."""
    record = Record()
    with coordinator(*options) as process:
        idle = peak_mb(process.pid)
        operator = operator_of(process)
        cpu: list[float] = []

        async def note_cpu() -> None:
            cpu.append(cpu_seconds_of(process.pid))

        async def burst() -> float:
            token = await operator.create(size, count, ROUNDS[count], deadline=600, retention="last_round")
            clients = [LoadClient(operator.port, number, size, record) for number in range(count)]
            enrolling, _ = await play(operator, token, clients, WHOLE_SECONDS, note_cpu)
            await note_cpu()
            return enrolling

        enrolling = asyncio.run(burst())
        peak = peak_mb(process.pid)
    latencies = np.array(record.accepted)
    return {
        "kilobytes": size,
        "clients": count,
        "updates": len(latencies),
        "updates_per_second": len(latencies) / record.seconds(),
        "whole_run_updates_per_second": len(latencies) / record.whole_seconds(),
        "cpu_ms_per_update": (cpu[1] - cpu[0]) / len(latencies) * 1e3,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
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
    """A table with the run of median updates/s of each case; Flower has no latencies and no enrolments."""
    figures = (
        "updates_per_second",
        "cpu_ms_per_update",
        "p50_ms",
        "p99_ms",
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
