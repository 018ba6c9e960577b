"""Rounds whose clients drop out: how many wait for the deadline, by how many clients are asked.

    python -m benchmarks.over_selection --json benchmarks/over_selection.json

Twenty clients are enrolled, and ten answers are wanted. Each client that is asked drops out of the round with a
probability of a fifth, and else answers at once. A round that lacks answers waits for its deadline of three seconds. It
then needs half of the answers. The same draws of drop-outs meet every setting.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import machine, parser, table, write
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import wait_for

CLIENTS, WANTED, DROPPED, DEADLINE = 20, 10, 0.2, 3.0
SETTINGS = (1.0, 1.3, 1.5, 2.0)


def played(coordinator: InThread, over_select: float, rounds: int) -> dict[str, Any]:
    """The seconds of each round, and how many of them waited."""
    part = {"min_clients": WANTED, "fraction": 0.5, "quorum": 0.5, "deadline_seconds": DEADLINE}
    federation = coordinator.create(
        name=f"over-{over_select}",
        rounds=rounds,
        evaluation={"every": rounds},
        participation=part | {"over_select": over_select},
    )
    clients = {one.name: one for one in coordinator.enrol(federation, *(f"c{n:02}" for n in range(CLIENTS)))}
    coordinator.post(f"{federation}/start")
    for client in clients.values():  # the evaluation before round 1
        client.answer(client.task(wait=30).json()).raise_for_status()
    drops = random.Random(0)
    for round in range(1, rounds + 1):
        coordinator.until(federation, round=round, phase="train")
        names = coordinator.get(federation)["asked"]
        gone = {name for name in clients if drops.random() < DROPPED}
        for name in names:
            if name not in gone and not answers(clients[name], round):
                break
        wait_for("the next round", partial(is_over, coordinator, federation, round))
    phases = [coordinator.get(f"{federation}/rounds/{round}")["phases"][0] for round in range(1, rounds + 1)]
    seconds, answered = ([phase[key] for phase in phases] for key in ("seconds", "answered"))
    return {
        "over_select": over_select,
        "asked": len(phases[0]["asked"]),
        "waited": sum(one >= DEADLINE for one in seconds),
        "answers": [len(names) for names in answered],
        "seconds": seconds,
    }


def answers(client: ScriptedClient, round: int) -> bool:
    """Whether the client still had a task of this round, and its answer was taken."""
    task = client.task(wait=1)
    return task.status_code == 200 and task.json()["round"] == round and client.answer(task.json()).is_success


def is_over(coordinator: InThread, federation: str, round: int) -> bool:
    view = coordinator.get(federation)
    return bool(view["round"] > round or view["phase"] != "train")


def main() -> None:
    """Play all settings, and print the table."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=50)
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as folder, in_thread(Path(folder) / "coordinator") as coordinator:
        runs = [played(coordinator, setting, options.rounds) for setting in SETTINGS]
    rows = [
        [f"{run['over_select']}", str(run["asked"]), str(run["waited"]), f"{median(run['seconds']):.2f}"]
        for run in runs
    ]
    print(table(["over_select", "asked", f"of {options.rounds} rounds waited", "s of a round, median"], rows))
    write(options.json, {"machine": machine(), "runs": runs})


if __name__ == "__main__":
    main()
