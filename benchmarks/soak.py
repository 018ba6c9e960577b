"""Load on a coordinator for hours: 1,000 clients with 32 KB in 200 rounds, then 50 clients with 5 MB in 20 rounds.

The coordinator is a process with real HTTP and a real disk. This process plays all clients of a leg, as
`benchmarks.coordinator_load` does. They never train, so every round is one burst. The first leg keeps every update, the
second only those of the last round.

    python -m benchmarks.soak --json soak.json
    python -m benchmarks.soak --legs 32:20:3:all          # KB, clients, rounds, retention: a quick look
    python -m benchmarks.soak --after 10,10000 --databases sqlite,postgresql      # what a late round costs

- updates/s: over all rounds, from a round's first task received to its last 201.
- task: a poll with `wait=0` by a client that has just received its task; each round, every tenth client sends one. A
  poll with `wait=30` would mostly wait for the other clients.
- update: from the first byte sent to the 201.
- memory and open files of the coordinator process, four times: before the first enrolment (idle), after the first round
  (start), before the last round (last), and after the last client has left (end). A leak shows between start and last.

``--after`` compares rounds that come after many with rounds that come after few, at 100 clients with 1 KB. Nobody plays
a million updates for it: three rounds are played, and the others are copies of their rows, written in bulk between two
runs of the coordinator (`tests/support/past_rounds.py`). `tests/coordinator/engine/test_costs_of_rounds.py` compares
them with played rounds. Then rounds are played on top, some on one store, some on the other, in turn.

- CPU per update: CPU time of the coordinator process, in the rounds and in a pause after them in which the retention of
  the last round does its work. The median of the turns.
- start: from the command to the first answer, with the copied rounds; memory then, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.coordinator_load import LoadClient, play
from benchmarks.harness import (
    Footprint,
    allow_many_connections,
    coordinator,
    cpu_seconds_of,
    footprint,
    integers,
    machine,
    parser,
    shown,
    write,
)
from benchmarks.players import SHAPES, Operator, Record, operator_of
from tests.support.coordinators import CoordinatorProcess
from tests.support.past_rounds import add_past_rounds, url_of
from tests.support.postgres import PostgresServer

LEGS = "32:1000:200:all,5120:50:20:last_round"
PROBES = 10  # in each round, every tenth client asks again for its task
LONGEST_SECONDS = 6 * 3600.0
LATE_KB, LATE_CLIENTS, MOST_ROUNDS = 1, 100, 100_000
TURN_ROUNDS = 10
PAUSE_SECONDS = 2.5  # longer than retention waits between two removals, and the scheduler between two looks


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


@dataclass
class LateRounds:
    """A coordinator whose federation has many rounds behind it, and what each turn of rounds on top has cost."""

    process: CoordinatorProcess
    behind: int
    start_seconds: float
    start_mb: float
    clients: list[LoadClient]
    cpu_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def play(self, rounds: int) -> None:
        """Play some rounds, and note what they cost for each update."""
        updates = rounds * len(self.clients)
        before, begun = cpu_seconds_of(self.process.pid), time.perf_counter()
        await play_rounds(self.clients, rounds)
        self.seconds.append((time.perf_counter() - begun) / rounds)
        await asyncio.sleep(PAUSE_SECONDS)
        self.cpu_ms.append((cpu_seconds_of(self.process.pid) - before) / updates * 1e3)

    def figures(self) -> dict[str, Any]:
        """The medians of all turns."""
        return {
            "rounds_behind": self.behind,
            "cpu_ms_per_update": float(np.median(self.cpu_ms)),
            "round_seconds": float(np.median(self.seconds)),
            "start_seconds": self.start_seconds,
            "start_mb": self.start_mb,
            "end_mb": footprint(self.process.pid).resident_mb,
            "cpu_ms": self.cpu_ms,
        }


async def play_rounds(clients: Sequence[LoadClient], rounds: int) -> None:
    """All clients answer the open stage and those that follow, ``rounds`` in all."""

    async def answer(client: LoadClient) -> None:
        for _ in range(rounds):
            task = await client.next_task()
            assert task is not None, "the federation has more rounds than anybody plays"
            await client.answer(client.http, task)

    await asyncio.gather(*(answer(client) for client in clients))


async def begin(operator: Operator, retention: str, evaluate_every: int | None) -> None:
    """Create the federation, and play the evaluation and the first three rounds."""
    token = await operator.create(
        LATE_KB, LATE_CLIENTS, MOST_ROUNDS, deadline=3600, retention=retention, evaluate_every=evaluate_every
    )
    clients = load_clients(operator)
    for client in clients:
        await client.enrol(client.http, token)
    await operator.start()
    await play_rounds(clients, 4 if evaluate_every is None else 7)
    await asyncio.sleep(PAUSE_SECONDS)
    for client in clients:
        client.http.close()


class LearningClient(LoadClient):
    """A client whose updates differ from round to round, and so do states and payloads, as when somebody trains."""

    def _update(self, task: dict[str, Any], payload: bytes) -> bytes:
        draws = np.random.default_rng([task["round"], self.number])
        self._change = 1e-3 * draws.standard_normal(SHAPES[LATE_KB], dtype=np.float32).reshape(-1)
        return super()._update(task, payload)


def load_clients(operator: Operator) -> list[LoadClient]:
    """The clients of the federation of ``begin``."""
    record = Record()
    return [LearningClient(operator.port, number, LATE_KB, record) for number in range(LATE_CLIENTS)]


def late_rounds(
    process: CoordinatorProcess, url: str | None, behind: int, retention: str, evaluate_every: int | None = None
) -> LateRounds:
    """The coordinator, started again on a federation with ``behind`` completed rounds."""
    operator = operator_of(process)
    asyncio.run(begin(operator, retention, evaluate_every))
    id = process.get("load")["id"]
    process.signal(signal.SIGTERM)
    process.wait()
    process.http.close()
    add_past_rounds(url_of(process.folder, url), id, behind - 3)
    begun = time.perf_counter()
    process.start()
    process.get("load")
    seconds = time.perf_counter() - begun
    resident = footprint(process.pid).resident_mb
    return LateRounds(process, behind, seconds, resident, load_clients(operator_of(process)))


def compare(urls: Sequence[str | None], numbers: Sequence[int], retention: str, turns: int) -> list[dict[str, Any]]:
    """The figures of rounds after each of the ``numbers`` of rounds, played in turn; ``urls`` of their databases."""
    with contextlib.ExitStack() as stack:
        stores = []
        for url, behind in zip(urls, numbers, strict=True):
            process = stack.enter_context(coordinator(*(["--database-url", url] if url else [])))
            stores.append(late_rounds(process, url, behind, retention))

        async def play_in_turn() -> None:
            for turn in range(turns):
                for store in stores if turn % 2 else reversed(stores):
                    await store.play(TURN_ROUNDS)

        asyncio.run(play_in_turn())
        return [{"retention": retention} | store.figures() for store in stores]


def compare_all(numbers: Sequence[int], databases: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """``compare`` on each database and with each retention."""
    measured = []
    with contextlib.ExitStack() as stack:
        for database in databases:
            server = PostgresServer(fsync=True) if database == "postgresql" else None
            if server is not None:
                stack.callback(server.remove)
            for retention in ("all", "last_round"):
                urls = [server.schema() if server is not None else None for _ in numbers]
                for figures in compare(urls, numbers, retention, turns):
                    measured.append({"database": database} | figures)
                    print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    return measured


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
    command.add_argument("--after", type=integers, help="compare rounds after so many rounds each, as 10,10000")
    command.add_argument("--databases", default="sqlite", help="of --after: sqlite, postgresql, or both with a comma")
    command.add_argument("--turns", type=int, default=10, help="of --after: turns of ten rounds on each store")
    options = command.parse_args()
    allow_many_connections()
    if options.after:
        measured = compare_all(options.after, options.databases.split(","), options.turns)
        write(options.json, {"machine": machine(), "stores": measured})
        print("\n\n".join(map(shown, measured)))
        return
    measured = []
    for leg in options.legs:
        measured.append(measure(leg))
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
        write(options.json, measured)
    print("\n\n".join(map(shown, measured)))


if __name__ == "__main__":
    main()
