"""How many updates a coordinator takes: real process, real HTTP, clients that enrol, poll, fetch and send, never train.

One coordinator process per case; this process plays all clients over one keep-alive connection each. All of them get
their tasks at the same moment, fetch the payload and send an update of the wanted size: each round is a burst.

    python -m benchmarks.coordinator_load --json load.json
    python -m benchmarks.coordinator_load --cases 32:100 --databases sqlite
    python -m benchmarks.coordinator_load --beside flower --repeat 3 --json benchmarks/coordinator.json
    python -m benchmarks.coordinator_tables          # docs/explanation/performance.md from the latter

With ``--beside flower`` the same number of clients sends updates of the same size to Flower's in-memory gRPC server
(``benchmarks/flower.py``), in the same minutes, case by case. This needs a Python with flwr (``--flower-python``);
without one it is made for the run in a temporary folder, from the package index.

- updates/s: updates accepted in all training rounds, over the time from a round's first poll answered to its last 201.
- p50, p99: from sending an update's first byte to its 201. Earlier answers 503 (too many uploads at once) are counted
  instead; the client waits as long as ``Retry-After`` says.
- CPU per update: of the coordinator's process, from the first poll of the first round to the end, over all updates.
- peak: the most memory that the coordinator process ever had (VmHWM), and how much of it before anybody enrolled.
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

from benchmarks import beside_flower
from benchmarks import coordinator_tables as tables
from benchmarks.beside_flower import ROUNDS
from benchmarks.harness import allow_many_connections, coordinator, cpu_seconds_of, footprint, machine, parser, write
from benchmarks.players import SHAPES, Connection, Operator, Player, Record, operator_of
from tests.support.postgres import PostgresServer

CASES = ((32, 10), (32, 100), (32, 1000), (5120, 10), (5120, 100))
ENROLLING = 100  # clients at once
WHOLE_SECONDS = 300.0


class LoadClient(Player):
    """A player with a connection of its own, on which it waits for tasks."""

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
    """A whole federation in at most ``seconds``: seconds of the enrolments and of the rounds.

    ``watch`` runs beside the rounds.
    """
    places = asyncio.Semaphore(ENROLLING)

    async def enrol(client: LoadClient) -> None:
        async with places:
            http = Connection(operator.port)
            await client.enrol(http, token)
            http.close()

    begun = time.perf_counter()
    await asyncio.gather(*(enrol(client) for client in clients))
    enrolled = time.perf_counter()
    working = asyncio.gather(*(client.work() for client in clients))
    await operator.start()
    async with asyncio.timeout(seconds):
        await asyncio.gather(working, *([watch()] if watch else []))
    ended = time.perf_counter()
    await operator.check_finished()
    return enrolled - begun, ended - enrolled


def measure(options: Sequence[str], size: int, count: int) -> dict[str, Any]:
    """One case: ``count`` clients with updates of ``size`` KB at a coordinator with these options."""
    record = Record()
    with coordinator(*options) as process:
        idle = footprint(process.pid).peak_mb
        operator = operator_of(process)
        used: list[float] = []

        async def note_cpu() -> None:
            used.append(cpu_seconds_of(process.pid))

        async def burst() -> float:
            token = await operator.create(size, count, ROUNDS[count], deadline=600, retention="last_round")
            clients = [LoadClient(operator.port, number, size, record) for number in range(count)]
            enrolling, _ = await play(operator, token, clients, WHOLE_SECONDS, note_cpu)
            await note_cpu()
            return enrolling

        enrolling = asyncio.run(burst())
        peak = footprint(process.pid).peak_mb
    latencies = np.array(record.accepted)
    return {
        "kilobytes": size,
        "clients": count,
        "updates": len(latencies),
        "updates_per_second": len(latencies) / record.seconds(),
        "whole_run_updates_per_second": len(latencies) / record.whole_seconds(),
        "cpu_ms_per_update": (used[1] - used[0]) / len(latencies) * 1e3,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "too_many_uploads": record.too_many,
        "enrolments_per_second": count / enrolling,
        "idle_mb": idle,
        "peak_mb": peak,
    }


def measure_on_postgres(server: PostgresServer, size: int, count: int) -> dict[str, Any]:
    """One case on a database of its own."""
    return measure(["--database-url", server.schema()], size, count)


def parse_cases(text: str) -> list[tuple[int, int]]:
    """``32:10,5120:100`` as pairs of kilobytes and clients."""
    cases = [(int(size), int(count)) for size, _, count in (case.partition(":") for case in text.split(","))]
    for size, count in cases:
        if size not in SHAPES or count not in ROUNDS:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB), numbers of clients {list(ROUNDS)}")
    return cases


def main() -> None:
    """Run all cases on all servers in turn, and print their tables."""
    command = parser(__doc__)
    command.add_argument("--cases", type=parse_cases, default=CASES, help="KB:clients, with commas between")
    command.add_argument("--databases", default="sqlite,postgresql")
    command.add_argument("--repeat", type=int, default=1, help="the case with the median updates/s is shown")
    command.add_argument("--beside", choices=["flower"], help="the same clients at another server, in turn")
    command.add_argument("--flower-python", help="a Python with flwr; without, one is made for the run")
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
            python = options.flower_python or stack.enter_context(beside_flower.own_python())
            servers |= {name: partial(beside_flower.measure, python, name) for name in beside_flower.CLIENTS}
        for (size, count), _, (name, case) in product(options.cases, range(options.repeat), servers.items()):
            if name not in beside_flower.CLIENTS or beside_flower.compares(name, size, count):
                numbers["cases"].append({"database": name} | case(size, count))
                print(json.dumps(numbers["cases"][-1]), file=sys.stderr, flush=True)
    print(f"{tables.rates(numbers)}\n\n{tables.goals(numbers)}")
    write(options.json, numbers)


if __name__ == "__main__":
    main()
