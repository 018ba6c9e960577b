"""A federation of 10,000 clients, each with a socket of its own and a waiting poll, that answer without training.

The coordinator is a process on SQLite and a folder. This process plays all clients over loopback; each needs as many
open files as there are clients, and some more (`ulimit -n`).

    python -m benchmarks.ten_thousand --json benchmarks/ten_thousand.json

- enrolling: from the first enrolment's first byte to the last 201, 50 at a time; the connections stay open.
- idle: all clients wait in polls of 30 s while nothing happens. CPU seconds of the coordinator per second, without
  heartbeats and with one every 2 s, each over ``--idle`` seconds.
- All clients evaluate before the first and after the last round; 1 % of them train in each round, with updates of
  32 KB.
- round: from the first fetched payload of a round to the last 201, the median of all rounds.
- sockets: the connections that the coordinator held while all clients waited.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    allow_many_connections,
    coordinator,
    cpu_seconds_of,
    footprint,
    machine,
    parser,
    shown,
    write,
)
from benchmarks.players import Connection, Operator, Player, Record, operator_of

KILOBYTES = 32
POLL_SECONDS = 30
ENROLLING_AT_ONCE = 50


def sockets_of(pid: int, port: int) -> int:
    """Connections that the process has accepted on its port."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if f"socket:[{row[9]}]" in inodes and int(row[1].split(":")[1], 16) == port]
    return sum(row[3] == "01" for row in mine)


class Crowd:
    """All clients of the federation. ``heartbeats``: whether their next polls ask for them."""

    def __init__(self, operator: Operator, clients: int):
        self.record, self.polls, self.heartbeats = Record(), 0, False
        self._port = operator.port
        self._entering = asyncio.Semaphore(ENROLLING_AT_ONCE)
        self._outside = clients
        self.inside = asyncio.Event()
        self._players = [Player(operator.federation, number, KILOBYTES, self.record) for number in range(clients)]

    async def play(self, token: str) -> None:
        """Enrol everybody, and play until the federation has ended."""
        async with asyncio.TaskGroup() as group:
            for player in self._players:
                group.create_task(self._live(player, token))

    async def _live(self, player: Player, token: str) -> None:
        http = Connection(self._port)
        async with self._entering:
            await player.enrol(http, token)
        self._outside -= 1
        if not self._outside:
            self.inside.set()
        while True:
            status, task = await player.poll(http, POLL_SECONDS, self.heartbeats)
            self.polls += 1
            if status == 410:
                break
            if status == 200:
                await player.answer(http, task)
        http.close()


async def idle_cpu(pid: int, seconds: float) -> float:
    """CPU seconds per second that the coordinator uses."""
    begun, before = time.perf_counter(), cpu_seconds_of(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds_of(pid) - before) / (time.perf_counter() - begun)


async def play(operator: Operator, pid: int, clients: int, rounds: int, share: float, idle: float) -> dict[str, Any]:
    """Play the whole federation; its figures. ``share``: of the clients that a round asks."""
    token = await operator.create(KILOBYTES, clients, rounds, deadline=3600, fraction=share, retention="last_round")
    crowd = Crowd(operator, clients)
    begun, cpu = time.perf_counter(), cpu_seconds_of(pid)
    playing = asyncio.create_task(crowd.play(token))
    await asyncio.wait([playing, entered := asyncio.create_task(crowd.inside.wait())], return_when="FIRST_COMPLETED")
    enrolled, cpu = time.perf_counter() - begun, cpu_seconds_of(pid) - cpu
    figures: dict[str, Any] = {"clients": clients, "rounds": rounds, "enrolled_in_seconds": enrolled}
    figures |= {"cpu_ms_per_enrolment": cpu / clients * 1e3, "all_enrolled": entered.done()}
    await asyncio.sleep(5)
    figures |= {"idle_cpu": await idle_cpu(pid, idle), "waiting_mb": footprint(pid).resident_mb}
    crowd.heartbeats = True
    await asyncio.sleep(POLL_SECONDS + 5)  # until the last poll without heartbeats has ended
    figures |= {"idle_cpu_heartbeats": await idle_cpu(pid, idle), "waiting_mb_heartbeats": footprint(pid).resident_mb}
    figures["sockets"] = sockets_of(pid, operator.port)

    begun = time.perf_counter()
    await operator.start()
    await playing
    seconds = time.perf_counter() - begun
    await operator.check_finished()
    spans = crowd.record.rounds().values()
    lengths = [max(end for _, end in span) - min(begin for begin, _ in span) for span in spans]
    return figures | {
        "updates": len(crowd.record.accepted),
        "evaluations": crowd.record.evaluations,
        "polls": crowd.polls,
        "round_seconds": statistics.median(lengths),
        "all_rounds_and_evaluations_seconds": seconds,
    }


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--clients", type=int, default=10_000)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--share", type=float, default=0.01, help="of the clients that a round asks")
    command.add_argument("--idle", type=float, default=60.0, help="seconds over which the idle coordinator is measured")
    options = command.parse_args()
    allow_many_connections()
    with coordinator() as process:
        idle_mb = footprint(process.pid).resident_mb
        operator = operator_of(process)
        figures = asyncio.run(play(operator, process.pid, options.clients, options.rounds, options.share, options.idle))
        figures |= {"idle_mb": idle_mb, "peak_mb": footprint(process.pid).peak_mb}
    print(shown(figures))
    write(options.json, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
