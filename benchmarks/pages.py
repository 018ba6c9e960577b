"""What the pages of a long federation cost: each GET route, at 100 clients that train and evaluate in every round.

The federation is filled as by `benchmarks.soak --after`: three rounds are played, the others are copies of their rows.

    python -m benchmarks.pages --rounds 500 --databases sqlite,postgresql --json benchmarks/pages.json

Milliseconds are from the request to the last byte, of an event stream to the first one: of the first request, and the
median of the next five; what takes longer than two seconds is asked for once. CPU is the coordinator's, for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import allow_many_connections, coordinator, cpu_seconds_of, machine, parser, table, write
from benchmarks.soak import late_rounds
from promptfed.testing.clients import bearer, secret_of
from tests.support.coordinators import CoordinatorProcess
from tests.support.postgres import PostgresServer

LONG_MS = 2000.0
PAGE_FIGURES = ("first_ms", "median_ms", "cpu_ms", "kilobytes")
FURTHER_PAGES = (  # what the operator's page and the command ask for, beside the plain routes
    "rounds?after=499",
    "rounds?limit=20",
    "metrics?limit=20",
    "metrics?format=csv",
    "events?newest=60",
    "clients?limit=1000",
)


def pages(url: str | None, rounds: int) -> list[dict[str, Any]]:
    """What each GET route of a federation with so many rounds costs."""
    with coordinator(*(["--database-url", url] if url else [])) as process:
        store = late_rounds(process, url, rounds, "all", evaluate_every=1)
        task = store.clients[0].poll(store.clients[0].http, 0)
        values = {
            "federation": "load",
            "round": rounds,
            "task_id": asyncio.run(task)[1]["task_id"],
            "name": "promptfl",
            "file": "app.js",
        }
        enrolment = process.token("load")
        tokens = [process.operator, *map(bearer, (secret_of(store.clients[0].name), enrolment))]
        paths = [path for path, verbs in process.get("/openapi.json")["paths"].items() if "get" in verbs]
        paths += [f"/v1/federations/{{federation}}/{more}" for more in FURTHER_PAGES]
        return [asked(process, path, path.format(**values), tokens) for path in sorted(paths)]


def asked(process: CoordinatorProcess, path: str, address: str, tokens: Sequence[dict[str, str]]) -> dict[str, Any]:
    """The cost of one page, with the first of the tokens that may have it."""
    for token in tokens:
        milliseconds: list[float] = []
        sizes: list[int] = []
        before = cpu_seconds_of(process.pid)
        while len(milliseconds) < (6 if sum(milliseconds) < LONG_MS else 1):
            begun = time.perf_counter()
            with process.http.stream("GET", address, headers=token) as answer:
                parts = answer.iter_bytes()
                first = next(parts, b"")
                endless = answer.headers.get("content-type", "").startswith("text/event-stream")
                sizes.append(len(first) + (0 if endless else sum(map(len, parts))))
            milliseconds.append((time.perf_counter() - begun) * 1e3)
            if answer.status_code in (401, 403):
                break
        else:
            cpu = (cpu_seconds_of(process.pid) - before) / len(milliseconds) * 1e3
            figures = {
                "cpu_ms": cpu,
                "first_ms": milliseconds[0],
                "median_ms": float(np.median(milliseconds[1:] or milliseconds)),
            }
            return {"page": path, "status": answer.status_code, **figures, "kilobytes": sizes[-1] / 1e3}
    raise SystemExit(f"nobody may ask for {path}")


def pages_of_all(rounds: int, databases: Sequence[str]) -> list[dict[str, Any]]:
    """``pages`` on each database."""
    measured = []
    with contextlib.ExitStack() as stack:
        for database in databases:
            server = PostgresServer(fsync=True) if database == "postgresql" else None
            if server is not None:
                stack.callback(server.remove)
            rows = pages(server.schema() if server is not None else None, rounds)
            measured += [{"database": database} | row for row in rows]
    return measured


def main() -> None:
    """Measure on each database, and print the table."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=500)
    command.add_argument("--databases", default="sqlite", help="sqlite, postgresql, or both with a comma")
    options = command.parse_args()
    allow_many_connections()
    rows = pages_of_all(options.rounds, options.databases.split(","))
    write(options.json, {"machine": machine(), "rounds": options.rounds, "pages": rows})
    cells = [[row["database"], f"`{row['page']}`", *(f"{row[key]:,.0f}" for key in PAGE_FIGURES)] for row in rows]
    print(table(["database", "page", "first, ms", "median, ms", "CPU, ms", "kB"], cells, texts=2))


if __name__ == "__main__":
    main()
