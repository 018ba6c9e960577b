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
import resource
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.coordinator_load import SHAPES, LoadClient, Record, coordinator, expect
from benchmarks.coordinator_load import Connection as Http

LEGS = "32:1000:200:all,5120:50:20:last_round"
PROBES = 10  # every so many clients ask again
ENROLLING = 20  # at once
MORE_THAN_ENOUGH = 6 * 3600.0


@dataclass(frozen=True)
class Leg:
    """A federation to be played."""

    kilobytes: int
    clients: int
    rounds: int
    retention: str

    def spec(self) -> dict[str, Any]:
        """Of the federation: evaluated before the first and after the last round only."""
        return {
            "name": "load",
            "method": {"name": "promptfl", "m": SHAPES[self.kilobytes][0]},
            "rounds": self.rounds,
            "participation": {"min_clients": self.clients, "deadline_seconds": 3600},
            "evaluation": {"every": self.rounds},
            "retention": self.retention,
        }


@dataclass
class Footprint:
    """What the coordinator holds at a moment, in MB and files; ``peak_mb`` is the most memory so far."""

    resident_mb: float
    peak_mb: float
    open_files: int


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
        """The next task, and for some clients how long it takes to be told it again."""
        task = await super().next_task()
        if task is not None and (self._number + task["round"]) % PROBES == 0:
            begun = time.perf_counter()
            status, _, body = await self.poll(0)
            self._soaked.polls.append(time.perf_counter() - begun)
            if status != 200 or json.loads(body)["task_id"] != task["task_id"]:
                raise SystemExit(f"asked again, the coordinator answers {status}: {body[:500]!r}")
        return task


def footprint(pid: int) -> Footprint:
    """Of the coordinator's process."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    megabytes = {key: int(value.split()[0]) / 1024 for key, _, value in lines if key in ("VmRSS", "VmHWM")}
    return Footprint(megabytes["VmRSS"], megabytes["VmHWM"], len(list(Path(f"/proc/{pid}/fd").iterdir())))


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


async def watch(http: Http, leg: Leg, record: Soaked, pid: int) -> None:
    """Note the footprint after each round, and tell how far the leg is: what is cut off has told something."""
    done = 0
    while True:
        await asyncio.sleep(1)
        view = json.loads(await expect(http, 200, "GET", "/v1/federations/load"))
        if view["round"] > done + 1 or (view["round"] > done and view["state"] == "finished"):
            done = view["round"] - (view["state"] != "finished")
            record.after[done] = footprint(pid)
            told = {**seen(leg, record), **asdict(record.after[done])}
            print(json.dumps(told), file=sys.stderr, flush=True)
        if view["state"] == "finished":
            return
        if view["state"] != "running":
            raise SystemExit(f"the federation is {view['state']}: {view['reason']}")


async def play(leg: Leg, port: int, pid: int, data: Path) -> tuple[Soaked, dict[str, float]]:
    """The whole leg; what was seen, and how it ended."""
    record = Soaked()
    content = np.random.default_rng(0).standard_normal(SHAPES[leg.kilobytes], dtype=np.float32).tobytes()
    http = Http(port, (data / "operator.token").read_text().strip())
    await expect(http, 201, "POST", "/v1/federations", json.dumps(leg.spec()).encode())
    token = json.loads(await expect(http, 201, "POST", "/v1/federations/load/enrolment-tokens"))["token"]
    clients = [SoakClient(number, port, leg, content, record) for number in range(leg.clients)]
    for start in range(0, leg.clients, ENROLLING):
        await asyncio.gather(*(client.enrol(token) for client in clients[start : start + ENROLLING]))
    begun = time.perf_counter()
    working = asyncio.gather(*(client.work() for client in clients))
    await expect(http, 200, "POST", "/v1/federations/load/start")
    async with asyncio.timeout(MORE_THAN_ENOUGH):
        await asyncio.gather(working, watch(http, leg, record, pid))
    seconds = time.perf_counter() - begun
    last = json.loads(await expect(http, 200, "GET", f"/v1/federations/load/rounds/{leg.rounds}"))
    counted = sum(len(phase["counted"]) for phase in last["phases"])
    if counted != leg.clients or len(record.accepted) != leg.clients * leg.rounds:
        raise SystemExit(f"{len(record.accepted)} updates were accepted, and {counted} of them count in the last round")
    http.close()
    return record, {"seconds": seconds}


def measure(leg: Leg) -> dict[str, Any]:
    """A leg on a coordinator of its own."""
    with tempfile.TemporaryDirectory(prefix="promptfed-soak-") as name:
        folder = Path(name)
        with coordinator(folder, []) as (port, pid):
            idle = footprint(pid)
            record, ended = asyncio.run(play(leg, port, pid, folder / "data"))
            end = footprint(pid)
            stored = sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())
    return {
        **asdict(leg),
        **ended,
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


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| update | clients | rounds | seconds | updates/s (first, last rounds) | task p50, p99 | update p50, p99 "
        "| memory before, first round, last round, after (peak) | open files, the same | stored |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        size = f"{row['kilobytes']} KB" if row["kilobytes"] < 1024 else f"{row['kilobytes'] // 1024} MB"
        moments = [row[key] for key in ("idle", "start", "last", "end")]
        cells = [size, f"{row['clients']:,}", str(row["rounds"]), f"{row['seconds']:,.0f}"]
        rates = [row[key] for key in ("updates_per_second", "first_rounds_per_second", "last_rounds_per_second")]
        cells.append("{:.0f} ({:.0f}, {:.0f})".format(*rates))
        cells += [f"{row[f'{call}_p50_ms']:,.0f} ms, {row[f'{call}_p99_ms']:,.0f} ms" for call in ("task", "update")]
        memory = ", ".join(f"{one['resident_mb']:.0f}" for one in moments)
        cells += [f"{memory} ({row['end']['peak_mb']:.0f}) MB", ", ".join(f"{one['open_files']:,}" for one in moments)]
        cells.append(f"{row['stored_mb']:,.0f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def legs(text: str) -> list[Leg]:
    """``32:1000:200:all`` and more of them, with commas between."""
    found = []
    for one in text.split(","):
        kilobytes, clients, rounds, retention = one.split(":")
        found.append(Leg(int(kilobytes), int(clients), int(rounds), retention))
        if found[-1].kilobytes not in SHAPES:
            raise argparse.ArgumentTypeError(f"sizes are {list(SHAPES)} (KB)")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--legs", type=legs, default=legs(LEGS), help="KB:clients:rounds:retention, with commas between"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    for leg in given.legs:
        rows.append(measure(leg))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
