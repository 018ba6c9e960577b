"""Three coordinators on one PostgreSQL and one object store, killed and stopped while they run federations.

A long run of the campaign of `tests.support.takeovers`. All blobs are objects, whatever their size.

    python -m benchmarks.takeover --kills 50 --stops 20 --json benchmarks/takeover.json

- Each federation must end with the state hashes, counted updates, weights and accuracies of an undisturbed run by one
  coordinator on SQLite and a folder.
- Each update that was answered 201 or 200 must be stored under the digest that was sent, and only one for each task.
- Takeover: from the signal until another coordinator answers for the federation. It is asked every 50 ms.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, parser, write
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.takeovers import Group, campaign

SEED = 0
METHODS = ("promptfl with adam", "promptfl", "pfedmoap")


def run(kills: int, stops: int, rounds: int) -> dict[str, Any]:
    """Run the campaign on a new PostgreSQL server and object store; its figures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="promptfed-takeover-")))
        postgres = PostgresServer(fsync=True)
        stack.callback(postgres.remove)
        objects = ObjectStoreServer()
        stack.callback(objects.stop)
        group = Group(folder, postgres.schema(), objects.bucket(), dict(objects.environment))
        stack.callback(group.close)
        return campaign(kills, stops, rounds, METHODS, SEED, folder, group)


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--kills", type=int, default=50)
    command.add_argument("--stops", type=int, default=20)
    command.add_argument("--rounds", type=int, default=25, help="of each federation")
    options = command.parse_args()
    about = machine()
    figures = run(options.kills, options.stops, options.rounds)
    print(json.dumps(figures, indent=1))
    write(options.json, {"machine": about, **figures})


if __name__ == "__main__":
    main()
