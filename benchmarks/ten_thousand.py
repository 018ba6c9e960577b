"""A federation of 10,000 clients that answer without training, 1 % of them in each round, over 50 sockets.

The coordinator is a process on SQLite and a folder. This process plays all clients over 50 keep-alive connections; each
request takes the next free one.

    python -m benchmarks.ten_thousand --json benchmarks/ten_thousand.json

- enrolling: from the first enrolment's first byte to the last 201.
- All clients evaluate before the first and after the last round.
- A sweep: every client polls once (`wait=0`), and those with a task fetch the payload and send an update of 32 KB.
  Sweeps are repeated until the federation has ended.
- sockets: the most connections that the coordinator held after a sweep.
"""

from __future__ import annotations

import asyncio
import os
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
from benchmarks.players import Connection, Operator, Player, Record, each_over, operator_of

KILOBYTES = 32


def sockets_of(pid: int, port: int) -> int:
    """Connections that the process has accepted on its port."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if f"socket:[{row[9]}]" in inodes and int(row[1].split(":")[1], 16) == port]
    return sum(row[3] == "01" for row in mine)


async def play(operator: Operator, pid: int, clients: int, sockets: int, rounds: int, share: float) -> dict[str, Any]:
    """Play the whole federation; its figures. ``share``: of the clients that a round asks."""
    record, polls, ended = Record(), 0, False
    players = [Player(operator.federation, number, KILOBYTES, record) for number in range(clients)]
    token = await operator.create(KILOBYTES, clients, rounds, deadline=3600, fraction=share, retention="last_round")
    connections = [Connection(operator.port) for _ in range(sockets)]

    async def poll(player: Player, http: Connection) -> None:
        nonlocal polls, ended
        status, task = await player.poll(http, 0)
        polls, ended = polls + 1, ended or status == 410
        if status == 200:
            await player.answer(http, task)

    begun, cpu = time.perf_counter(), cpu_seconds_of(pid)
    await each_over(connections, players, lambda player, http: player.enrol(http, token))
    enrolled, cpu = time.perf_counter() - begun, cpu_seconds_of(pid) - cpu
    await operator.start()
    begun, most = time.perf_counter(), 0
    while not ended:
        await each_over(connections, players, poll)
        most = max(most, sockets_of(pid, operator.port))
    seconds = time.perf_counter() - begun
    await operator.check_finished()
    for connection in connections:
        connection.close()
    return {
        "clients": clients,
        "rounds": rounds,
        "enrolled_in_seconds": enrolled,
        "cpu_ms_per_enrolment": cpu / clients * 1e3,
        "sockets": most,
        "updates": len(record.accepted),
        "evaluations": record.evaluations,
        "polls": polls,
        "rounds_seconds": seconds,
        "polls_per_second": polls / seconds,
    }


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--clients", type=int, default=10_000)
    command.add_argument("--sockets", type=int, default=50)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--share", type=float, default=0.01, help="of the clients that a round asks")
    options = command.parse_args()
    allow_many_connections()
    with coordinator() as process:
        idle = footprint(process.pid).resident_mb
        operator = operator_of(process)
        figures = asyncio.run(
            play(operator, process.pid, options.clients, options.sockets, options.rounds, options.share)
        )
        figures |= {"idle_mb": idle, "peak_mb": footprint(process.pid).peak_mb}
    print(shown(figures))
    write(options.json, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
