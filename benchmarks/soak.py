"""One coordinator under load for long: 1,000 clients and 200 rounds of 32 KB, then 50 clients and 20 rounds of 5 MB.

A real coordinator process, real HTTP and disk; this process plays all clients of a leg as `benchmarks.coordinator_load`
does. They never train, so every round is one burst. The first leg keeps every update, the second the last round's only.

    python -m benchmarks.soak --json soak.json
    python -m benchmarks.soak --legs 32:20:3:all          # KB, clients, rounds, retention: a quick look

- updates/s: over all rounds, from a round's first task received to its last 201.
- task: a poll with `wait=0` by a client that has just received its task; every tenth client sends one each round. A
  poll with `wait=30` would measure the other clients. update: from the first byte sent to the 201.
- memory and open files are the coordinator process's: before anybody came, after the first round, before the last one,
  and when all have gone. A leak would show between the second and the third.
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
PROBES = 10  # one client in so many asks again
LONGEST_SECONDS = 6 * 3600.0


@dataclass(frozen=True)
class Leg:
    """A federation to be played."""

    kilobytes: int
    clients: int
    rounds: int
    retention: str


@dataclass
class Soaked(Record):
    """What a leg's clients have seen, with the seconds of repeated polls and the footprint after each round."""

    polls: list[float] = field(default_factory=list)
    after: dict[int, Footprint] = field(default_factory=dict)


class SoakClient(LoadClient):
    """A client that in some rounds asks for its task again, and measures that."""

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
    """Figures of the rounds that are over."""
    whole = [spans for spans in record.rounds().values() if len(spans) == leg.clients]
    seconds = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in whole]
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
    """p50 and p99 in milliseconds; NaN where nobody has asked yet."""
    return {f"{call}_p{q}_ms": float(np.percentile(seconds or [np.nan], q)) * 1e3 for q in (50, 99)}


async def watch(operator: Operator, leg: Leg, record: Soaked, pid: int) -> None:
    """Note the footprint after each round, and print the figures so far for a run that is interrupted."""
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
    """The whole leg; seconds of its rounds. SystemExit where an update does not count."""
    token = await operator.create(leg.kilobytes, leg.clients, leg.rounds, deadline=3600, retention=leg.retention)
    clients = [SoakClient(operator.port, number, leg.kilobytes, record) for number in range(leg.clients)]
    _, seconds = await play(operator, token, clients, LONGEST_SECONDS, lambda: watch(operator, leg, record, pid))
    last = await operator.view(f"/rounds/{leg.rounds}")
    counted = sum(len(phase["counted"]) for phase in last["phases"])
    if counted != leg.clients or len(record.accepted) != leg.clients * leg.rounds:
        raise SystemExit(f"{len(record.accepted)} updates were accepted, and {counted} of them count in the last round")
    return seconds


def measure(leg: Leg) -> dict[str, Any]:
    """A leg on a coordinator of its own."""
    record = Soaked()
    with coordinator() as process:
        idle = footprint(process.pid)
        seconds = asyncio.run(play_leg(leg, operator_of(process), record, process.pid))
        end = footprint(process.pid)
        stored = sum(path.stat().st_size for path in process.folder.rglob("*") if path.is_file())
    return {
        **asdict(leg),
        "seconds": seconds,
        **figures(leg, record),
        "idle": asdict(idle),
        "start": asdict(record.after[min(record.after)]),
        "last": asdict(record.after[max(number for number in record.after if number < leg.rounds)]),
        "end": asdict(end),
        "stored_mb": stored / 1e6,
    }


def parse_legs(text: str) -> list[Leg]:
    """``32:1000:200:all`` and more of them, with commas between."""
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
