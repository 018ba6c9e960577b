"""Updates per second of asynchronous rounds beside those of rounds, with clients that do not train.

    python -m benchmarks.asynchronous_load --json benchmarks/asynchronous_load.json

Both schedules take turns, each run with its own coordinator process on SQLite and 32 KB updates. The buffer is a tenth
of the clients, and there are ten times as many states as rounds. They count at least as many updates, since what comes
while a state is computed counts in the next one. Rates are over the whole run, from the first task to the last 201.
Runs are long, because an asynchronous one ends with a task of each client whose answer nobody waits for.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.coordinator_load import measure
from benchmarks.harness import allow_many_connections, integers, machine, parser, table, write

KILOBYTES = 32
ROUNDS = {100: 40, 1000: 8}
RATE = "whole_run_updates_per_second"


def main() -> None:
    """Run both schedules in turns, and print the medians."""
    command = parser(__doc__)
    command.add_argument("--clients", type=integers, default=[100, 1000])
    command.add_argument("--repeat", type=int, default=3)
    options = command.parse_args()
    allow_many_connections()
    runs: list[dict[str, Any]] = []
    rows = []
    for count in options.clients:
        for _ in range(options.repeat):
            for schedule, buffer in (("rounds", None), ("buffered", count // 10)):
                runs.append({"schedule": schedule, **measure([], KILOBYTES, count, buffer, ROUNDS[count])})
                print(count, schedule, f"{runs[-1][RATE]:.0f} updates/s", flush=True)
                write(options.json, {"machine": machine(), "runs": runs})
        rates = {
            schedule: median(run[RATE] for run in runs if (run["schedule"], run["clients"]) == (schedule, count))
            for schedule in ("rounds", "buffered")
        }
        ratio = rates["buffered"] / rates["rounds"]
        rows.append([str(count), f"{rates['rounds']:.0f}", f"{rates['buffered']:.0f}", f"{ratio:.2f}"])
    print(table(["clients", "rounds, updates/s", "asynchronous, updates/s", "ratio"], rows))


if __name__ == "__main__":
    main()
