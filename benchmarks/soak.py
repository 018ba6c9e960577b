"""Load on a coordinator for hours: 1,000 clients with 32 KB in 200 rounds, then 50 clients with 5 MB in 20 rounds.

The coordinator is a process with real HTTP and a real disk. This process plays all clients of a leg, as
`benchmarks.coordinator_load` does. They never train, so every round is one burst. The first leg keeps every update, the
second only those of the last round.

    python -m benchmarks.soak --json soak.json
    python -m benchmarks.soak --legs 32:20:3:all          # KB, clients, rounds, retention: a quick look

- updates/s: over all rounds, from a round's first task received to its last 201.
- task: a poll with `wait=0` by a client that has just received its task; each round, every tenth client sends one. A
  poll with `wait=30` would mostly wait for the other clients.
- update: from the first byte sent to the 201.
- memory and open files of the coordinator process, four times: before the first enrolment (idle), after the first round
  (start), before the last round (last), and after the last client has left (end). A leak shows between start and last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.coordinator_load import LoadClient, play
from benchmarks.harness import Footprint, allow_many_connections, coordinator, footprint, parser, shown, write
from benchmarks.players import SHAPES, Operator, Record, operator_of

LEGS = "32:1000:200:all,5120:50:20:last_round"
PROBES = 10  # in each round, every tenth client asks again for its task
LONGEST_SECONDS = 6 * 3600.0


@dataclass(frozen=True)
class Leg:
    """A federation to play: the size of its updates, its clients, rounds and `retention`."""

    kilobytes: int
    clients: int
    rounds: int
    retention: str


@dataclass
class Soaked(Record):
    """What a leg's clients have seen. ``polls``: seconds of repeated polls; ``after``: the footprint after a round."""

    polls: list[float] = field(default_factory=list)
    after: dict[int, Footprint] = field(default_factory=dict)


class SoakClient(LoadClient):
    """A client that asks for its task a second time in some rounds and measures the answer."""

    record: Soaked

    async def next_task(self) -> dict[str, Any] | None:
        task = await super().next_task()
        if task is not None and (self.number + task["round"]) % PROBES == 0:
            begun = time.perf_counter()
            status, again = await self.poll(self.http, 0)
            self.record.polls.append(time.perf_counter() - begun)
            if status != 200 or again["task_id"] != task["task_id"]:
                raise SystemExit(f"asked again for a task, the coordinator answers {status}: {again}")
        return task


def figures(leg: Leg, record: Soaked) -> dict[str, Any]:
    """Rates and latencies of the rounds in which every client has sent its update."""
    complete = [spans for spans in record.rounds().values() if len(spans) == leg.clients]
    seconds = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in complete]
    return {
        "rounds_over": len(seconds),
        "updates": len(record.accepted),
        "updates_per_second": leg.clients * len(seconds) / sum(seconds),
        "first_rounds_per_second": leg.clients / float(np.median(seconds[:10])),
        "last_rounds_per_second": leg.clients / float(np.median(seconds[-10:])),
        "too_many_uploads": record.too_many,
        **quantiles("task", record.polls),
        **quantiles("update", record.accepted),
    }


def quantiles(call: str, seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds; NaN without values."""
    return {f"{call}_p{q}_ms": float(np.percentile(seconds or [np.nan], q)) * 1e3 for q in (50, 99)}


async def watch(operator: Operator, leg: Leg, record: Soaked, pid: int) -> None:
    """Note the footprint after each round and print the figures so far, in case the run is interrupted."""
    done = 0
    while True:
        await asyncio.sleep(1)
        view = await operator.view()
        if view["round"] > done + 1 or (view["round"] > done and view["state"] == "finished"):
            done = view["round"] - (view["state"] != "finished")
            record.after[done] = footprint(pid)
            print(json.dumps({**figures(leg, record), **asdict(record.after[done])}), file=sys.stderr, flush=True)
        if view["state"] == "finished":
            return
        if view["state"] != "running":
            raise SystemExit(f"the federation is {view['state']}: {view['reason']}")


async def play_leg(leg: Leg, operator: Operator, record: Soaked, pid: int) -> float:
    """Play the whole leg; seconds of its rounds. SystemExit if an update does not count."""
    token = await operator.create(leg.kilobytes, leg.clients, leg.rounds, deadline=3600, retention=leg.retention)
    clients = [SoakClient(operator.port, number, leg.kilobytes, record) for number in range(leg.clients)]
    _, seconds = await play(operator, token, clients, LONGEST_SECONDS, lambda: watch(operator, leg, record, pid))
    last = await operator.view(f"/rounds/{leg.rounds}")
    counted = sum(len(phase["counted"]) for phase in last["phases"])
    if counted != leg.clients or len(record.accepted) != leg.clients * leg.rounds:
        raise SystemExit(f"{len(record.accepted)} updates were accepted, and {counted} of them count in the last round")
    return seconds


def measure(leg: Leg) -> dict[str, Any]:
    """Play a leg on a new coordinator; its figures."""
    record = Soaked()
    with coordinator() as process:
        idle = footprint(process.pid)
        seconds = asyncio.run(play_leg(leg, operator_of(process), record, process.pid))
        end = footprint(process.pid)
        stored = sum(path.stat().st_size for path in process.folder.rglob("*") if path.is_file())
    # Rounds of less than a second share a footprint: a short leg may have only the one after its last round.
    noted = list(record.after.values())
    return {
        **asdict(leg),
        "seconds": seconds,
        **figures(leg, record),
        "idle": asdict(idle),
        "start": asdict(noted[0]),
        "last": asdict(noted[-2:][0]),
        "end": asdict(end),
        "stored_mb": stored / 1e6,
    }


def parse_legs(text: str) -> list[Leg]:
    """The legs of ``32:1000:200:all,5120:50:20:last_round``."""
    legs = []
    for leg in text.split(","):
        kilobytes, clients, rounds, retention = leg.split(":")
        legs.append(Leg(int(kilobytes), int(clients), int(rounds), retention))
        if legs[-1].kilobytes not in SHAPES:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB)")
    return legs


def main() -> None:
    """Play all legs and print their figures."""
    command = parser(__doc__)
    command.add_argument(
        "--legs", type=parse_legs, default=LEGS, help="KB:clients:rounds:retention, separated by commas"
    )
    options = command.parse_args()
    allow_many_connections()
    measured = []
    for leg in options.legs:
        measured.append(measure(leg))
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
        write(options.json, measured)
    print("\n\n".join(map(shown, measured)))


if __name__ == "__main__":
    main()
