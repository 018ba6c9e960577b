"""One coordinator under load for long: 1,000 clients and 200 rounds of 32 KB, then 50 clients and 20 rounds of 5 MB.

A real coordinator process, real HTTP and disk; this process plays all clients of a leg as `benchmarks.coordinator_load`
does, which enrol, poll, fetch and send, and never train: every round is one burst. The first leg keeps every update,
the second the last round's only.

    python -m benchmarks.soak --json soak.json
    python -m benchmarks.soak --legs 32:20:3:all          # KB, clients, rounds, retention: a quick look

- updates/s: over all rounds, from a round's first task received to its last 201.
- task: a poll with `wait=0` by a client that has just received its task; every tenth client sends one each round (how
  long a poll with `wait=30` takes is the other clients' affair). update: from the first byte sent to the 201.
- memory and open files are the coordinator process's: before anybody came, after the first round, before the last one,
  and when all have gone. What grows with the rounds would show between the second and the third.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.beside_flower import SHAPES
from benchmarks.coordinator_load import (
    Connection,
    Footprint,
    LoadClient,
    Record,
    allow_many_connections,
    content_of,
    coordinator,
    expect,
    footprint,
    load_spec,
    play,
)
from benchmarks.coordinator_tables import update_size
from benchmarks.harness import parser, table, write

LEGS = "32:1000:200:all,5120:50:20:last_round"
PROBES = 10  # every so many clients ask again
MORE_THAN_ENOUGH = 6 * 3600.0


@dataclass(frozen=True)
class Leg:
    """A federation to be played."""

    kilobytes: int
    clients: int
    rounds: int
    retention: str


@dataclass
class Soaked(Record):
    """What a leg's clients have seen."""

    polls: list[float] = field(default_factory=list)
    after: dict[int, Footprint] = field(default_factory=dict)


class SoakClient(LoadClient):
    """A client that may ask for its task a second time, and measures that."""

    def __init__(self, number: int, port: int, leg: Leg, content: bytes, record: Soaked):
        super().__init__(port, f"client-{number:04}", content, SHAPES[leg.kilobytes], record)
        self._number, self._soaked = number, record

    async def next_task(self) -> dict[str, Any] | None:
        """The next task, and for some clients how long it takes to receive it again."""
        task = await super().next_task()
        if task is not None and (self._number + task["round"]) % PROBES == 0:
            begun = time.perf_counter()
            status, _, body = await self.poll(0)
            self._soaked.polls.append(time.perf_counter() - begun)
            if status != 200 or json.loads(body)["task_id"] != task["task_id"]:
                raise SystemExit(f"asked again, the coordinator answers {status}: {body[:500]!r}")
        return task


def seen(leg: Leg, record: Soaked) -> dict[str, Any]:
    """Figures of the rounds that are over."""
    bursts: dict[int, list[float]] = {}
    for number, begun, ended in record.spans:
        bursts.setdefault(number, []).extend((begun, ended))
    seconds = [max(times) - min(times) for times in bursts.values() if len(times) == 2 * leg.clients]
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


async def watch(http: Connection, leg: Leg, record: Soaked, pid: int) -> None:
    """Note the footprint after each round, and print how far the leg is: one that is cut off has shown something."""
    done = 0
    while True:
        await asyncio.sleep(1)
        view = json.loads(await expect(http, 200, "GET", "/v1/federations/load"))
        if view["round"] > done + 1 or (view["round"] > done and view["state"] == "finished"):
            done = view["round"] - (view["state"] != "finished")
            record.after[done] = footprint(pid)
            print(json.dumps({**seen(leg, record), **asdict(record.after[done])}), file=sys.stderr, flush=True)
        if view["state"] == "finished":
            return
        if view["state"] != "running":
            raise SystemExit(f"the federation is {view['state']}: {view['reason']}")


async def play_leg(leg: Leg, port: int, pid: int, data: Path) -> tuple[Soaked, float]:
    """The whole leg; what was seen, and the seconds of its rounds."""
    record, content = Soaked(), content_of(leg.kilobytes)
    http = Connection(port, (data / "operator.token").read_text().strip())
    clients = [SoakClient(number, port, leg, content, record) for number in range(leg.clients)]
    spec = load_spec(leg.kilobytes, leg.clients, leg.rounds, leg.retention, 3600)
    _, seconds = await play(http, spec, clients, MORE_THAN_ENOUGH, lambda: watch(http, leg, record, pid))
    last = json.loads(await expect(http, 200, "GET", f"/v1/federations/load/rounds/{leg.rounds}"))
    counted = sum(len(phase["counted"]) for phase in last["phases"])
    if counted != leg.clients or len(record.accepted) != leg.clients * leg.rounds:
        raise SystemExit(f"{len(record.accepted)} updates were accepted, and {counted} of them count in the last round")
    http.close()
    return record, seconds


def measure(leg: Leg) -> dict[str, Any]:
    """A leg on a coordinator of its own."""
    with tempfile.TemporaryDirectory(prefix="promptfed-soak-") as name:
        folder = Path(name)
        with coordinator(folder) as (port, pid):
            idle = footprint(pid)
            record, seconds = asyncio.run(play_leg(leg, port, pid, folder / "data"))
            end = footprint(pid)
            stored = sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())
    return {
        **asdict(leg),
        "seconds": seconds,
        **seen(leg, record),
        "idle": asdict(idle),
        "start": asdict(record.after[min(record.after)]),
        "last": asdict(record.after[max(number for number in record.after if number < leg.rounds)]),
        "end": asdict(end),
        "stored_mb": stored / 1e6,
    }


def quantiles(call: str, seconds: list[float]) -> dict[str, float]:
    """In milliseconds; NaN where nobody has asked yet."""
    return {f"{call}_p{q}_ms": float(np.percentile(seconds or [np.nan], q)) * 1e3 for q in (50, 99)}


def markdown(legs: list[dict[str, Any]]) -> str:
    """The table of the legs."""
    columns = ["update", "clients", "rounds", "seconds", "updates/s (first, last rounds)", "task p50, p99"]
    columns += ["update p50, p99", "memory before, first round, last round, after (peak)", "open files, the same"]
    rows = []
    for leg in legs:
        moments = [leg[key] for key in ("idle", "start", "last", "end")]
        cells = [update_size(leg["kilobytes"]), f"{leg['clients']:,}", str(leg["rounds"]), f"{leg['seconds']:,.0f}"]
        rates = [leg[key] for key in ("updates_per_second", "first_rounds_per_second", "last_rounds_per_second")]
        cells.append("{:.0f} ({:.0f}, {:.0f})".format(*rates))
        cells += [f"{leg[f'{call}_p50_ms']:,.0f} ms, {leg[f'{call}_p99_ms']:,.0f} ms" for call in ("task", "update")]
        memory = ", ".join(f"{moment['resident_mb']:.0f}" for moment in moments)
        cells.append(f"{memory} ({leg['end']['peak_mb']:.0f}) MB")
        cells += [", ".join(f"{moment['open_files']:,}" for moment in moments), f"{leg['stored_mb']:,.0f} MB"]
        rows.append(cells)
    return table([*columns, "stored"], rows, texts=0)


def legs(text: str) -> list[Leg]:
    """``32:1000:200:all`` and more of them, with commas between."""
    parsed = []
    for leg in text.split(","):
        kilobytes, clients, rounds, retention = leg.split(":")
        parsed.append(Leg(int(kilobytes), int(clients), int(rounds), retention))
        if parsed[-1].kilobytes not in SHAPES:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB)")
    return parsed


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument(
        "--legs", type=legs, default=legs(LEGS), help="KB:clients:rounds:retention, with commas between"
    )
    options = command.parse_args()
    allow_many_connections()
    measured = []
    for leg in options.legs:
        measured.append(measure(leg))
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
        write(options.json, measured, indent=2)
    print(markdown(measured))


if __name__ == "__main__":
    main()
