"""One federation of 10,000 clients that answer without training, 1 % of them a round, over 50 sockets.

A real coordinator process (SQLite, a folder), real HTTP; this process plays all clients over so many keep-alive
connections, whatever their number: each request goes over the next free one.

    python -m benchmarks.ten_thousand --json benchmarks/ten_thousand.json

- enrolling: from the first enrolment's first byte to the last 201.
- before the first and after the last round all clients evaluate, as any federation's do.
- a round: every client polls once (`wait=0`); those who are asked fetch the payload and send an update of 32 KB.
  Who is asked when a phase opens again is found by the next sweep over all clients.
- sockets: connections that the coordinator has accepted, counted while the rounds run.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.beside_flower import SHAPES
from benchmarks.coordinator_load import (
    FINGERPRINT,
    Connection,
    allow_many_connections,
    content_of,
    coordinator,
    cpu_seconds_of,
    expect,
    footprint,
)
from benchmarks.harness import machine, parser, table, write

KILOBYTES = 32
PATH = "/v1/federations/many"


class Caller(Connection):
    """A connection over which any client may speak."""

    async def ask_as(self, token: str, verb: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer to one request with this token."""
        self._token = token
        status, _, content = await self.ask(verb, path, body, **headers)
        return status, content


@dataclass
class Seen:
    """What the clients have seen."""

    polls: int = 0
    updates: int = 0
    evaluations: int = 0
    sweeps: list[float] = field(default_factory=list)
    ended: bool = False


def secret_of(name: str) -> str:
    """A client's secret."""
    return hashlib.sha256(name.encode()).hexdigest()


async def over(callers: Sequence[Caller], names: Sequence[str], one: Callable[[Caller, str], Awaitable[None]]) -> None:
    """``one`` for each name, each over the next free connection."""
    left = iter(names)

    async def work(caller: Caller) -> None:
        for name in left:
            await one(caller, name)

    await asyncio.gather(*(work(caller) for caller in callers))


def enrolment(name: str) -> bytes:
    """The body of an enrolment."""
    shape = {"d_t": SHAPES[KILOBYTES][1], "d_e": 8}
    body = {"name": name, "secret": secret_of(name), "num_samples": 10, "class_names": ["circle", "square"]}
    return json.dumps(body | {"backbone_fingerprint": FINGERPRINT, "backbone_shape": shape}).encode()


def update(task: dict[str, Any], content: bytes) -> bytes:
    """An update that nobody has trained."""
    about = {"metrics": {"loss": 0.5}, "payload_sha256": task["payload"]["sha256"], "task_id": task["task_id"]}
    tensor = {"dtype": "F32", "shape": SHAPES[KILOBYTES], "data_offsets": [0, len(content)]}
    header = json.dumps({"__metadata__": {"promptfed": json.dumps(about)}, "context": tensor}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content


async def poll(caller: Caller, name: str, seen: Seen, content: bytes) -> None:
    """Ask once as this client, and answer what it is asked."""
    token = secret_of(name)
    status, body = await caller.ask_as(token, "GET", f"{PATH}/task?wait=0")
    seen.polls += 1
    if status == 410:
        seen.ended = True
    if status != 200:
        if status not in (204, 410):
            raise SystemExit(f"a poll is answered {status}: {body[:300]!r}")
        return
    task = json.loads(body)
    path = f"{PATH}/tasks/{task['task_id']}"
    status, payload = await caller.ask_as(token, "GET", f"{path}/payload")
    if status != 200 or len(payload) != task["payload"]["bytes"]:
        raise SystemExit(f"a payload is answered {status}")
    if task["kind"] == "train":
        sent = update(task, content)
        digest = base64.b64encode(hashlib.sha256(sent).digest()).decode()
        headers = {"Content_Digest": f"sha-256=:{digest}:"}
        status, body = await caller.ask_as(token, "PUT", f"{path}/update", sent, **headers)
        seen.updates += 1
    else:
        found = json.dumps({"splits": {"test": {"accuracy": 0.5, "num_samples": 10}}}).encode()
        headers = {"Content_Type": "application/json"}
        status, body = await caller.ask_as(token, "PUT", f"{path}/evaluation", found, **headers)
        seen.evaluations += 1
    if status != 201:
        raise SystemExit(f"an answer is answered {status}: {body[:300]!r}")


def sockets_of(pid: int, port: int) -> int:
    """Connections that the process has accepted on its port."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if f"socket:[{row[9]}]" in inodes and int(row[1].split(":")[1], 16) == port]
    return sum(row[3] == "01" for row in mine)


async def enrol(caller: Caller, name: str, token: str) -> None:
    """One client's enrolment."""
    status, body = await caller.ask_as(
        token, "POST", f"{PATH}/clients", enrolment(name), Content_Type="application/json"
    )
    if status != 201:
        raise SystemExit(f"an enrolment is answered {status}: {body[:300]!r}")


async def play(port: int, pid: int, operator: str, clients: int, sockets: int, rounds: int, share: float) -> Any:
    """The whole federation; figures."""
    seen, content = Seen(), content_of(KILOBYTES)
    names = [f"client-{number:05}" for number in range(clients)]
    http = Connection(port, operator)
    spec = {
        "name": "many",
        "method": {"name": "promptfl", "m": SHAPES[KILOBYTES][0]},
        "rounds": rounds,
        "participation": {"min_clients": max(1, int(clients * share)), "fraction": share, "deadline_seconds": 3600},
        "evaluation": {"every": rounds},
        "retention": "last_round",
    }
    await expect(http, 201, "POST", "/v1/federations", json.dumps(spec).encode())
    uses = json.dumps({"uses": clients}).encode()
    token = json.loads(await expect(http, 201, "POST", f"{PATH}/enrolment-tokens", uses))["token"]
    callers = [Caller(port, operator) for _ in range(sockets)]

    begun, cpu = time.perf_counter(), cpu_seconds_of(pid)
    await over(callers, names, lambda caller, name: enrol(caller, name, token))
    enrolled = time.perf_counter() - begun
    cpu = cpu_seconds_of(pid) - cpu
    http.close()  # Unused for longer than the coordinator may keep one.
    await expect(http, 200, "POST", f"{PATH}/start")
    http.close()
    begun, most = time.perf_counter(), 0
    while not seen.ended:
        sweep = time.perf_counter()
        await over(callers, names, lambda caller, name: poll(caller, name, seen, content))
        seen.sweeps.append(time.perf_counter() - sweep)
        most = max(most, sockets_of(pid, port))
    seconds = time.perf_counter() - begun
    state = json.loads(await expect(http, 200, "GET", PATH))["state"]
    if state != "finished":
        raise SystemExit(f"the federation is {state}")
    for caller in (http, *callers):
        caller.close()
    return {
        "clients": clients,
        "rounds": rounds,
        "enrolled_in_seconds": enrolled,
        "cpu_ms_per_enrolment": cpu / clients * 1e3,
        "sockets": most,
        "updates": seen.updates,
        "evaluations": seen.evaluations,
        "polls": seen.polls,
        "rounds_seconds": seconds,
        "polls_per_second": seen.polls / seconds,
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
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="promptfed-many-") as folder, coordinator(Path(folder)) as (port, pid):
        idle = footprint(pid).resident_mb
        operator = (Path(folder) / "data" / "operator.token").read_text().strip()
        work = play(port, pid, operator, options.clients, options.sockets, options.rounds, options.share)
        found = asyncio.run(work)
        found |= {"idle_mb": idle, "peak_mb": footprint(pid).peak_mb}
    numbers = {"machine": machine() | {"cores": os.cpu_count()}, "load": [load, os.getloadavg()], **found}
    print(table(["", ""], [[name, f"{value:,.1f}"] for name, value in found.items()]))
    write(options.json, numbers)


if __name__ == "__main__":
    main()
