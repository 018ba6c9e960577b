"""Three coordinators on one PostgreSQL and one object store, disturbed while they run federations.

A long run of the campaign of `tests.support.takeovers`, which describes the disturbances. All blobs are objects.

    python -m benchmarks.takeover --seed 0 --json benchmarks/takeover.json
    python -m benchmarks.takeover --ways store=6 --seed 5 --json benchmarks/takeover.json
    python -m benchmarks.takeover --many 1000 --running 100 --json benchmarks/takeover.json

- Each federation must end with the state hashes, counted updates, weights and accuracies of an undisturbed run by one
  coordinator on SQLite and a folder.
- Each update that was answered 201 or 200 must be stored under the digest that was sent, and only one for each task.
- Takeover: from the signal until another coordinator answers for the federation. It is asked every 50 ms.
- Stale answer: it shows less than an answer that had arrived before the request was sent. All are asked five times a
  second.

With ``--many`` so many federations are divided among the three, and one coordinator is killed while clients answer the
running ones. The file of ``--json`` keeps the figures of each seed, and of ``--many``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import machine, parser, write
from tests.support.many_federations import kill_one_of_three
from tests.support.object_store import ObjectStoreServer
from tests.support.postgres import PostgresServer
from tests.support.takeovers import WAYS, Group, campaign

SEED = 0
METHODS = ("promptfl with adam", "promptfl", "pfedmoap")
USUAL = "kill=4,stop=12,inside=10,cut=12,freeze=6"


@contextmanager
def group() -> Iterator[tuple[Path, PostgresServer, Group]]:
    """A folder, a new PostgreSQL server, and three coordinators on it and on a new object store."""
    with tempfile.TemporaryDirectory(prefix="promptfed-takeover-") as folder:
        postgres, objects = PostgresServer(fsync=True), ObjectStoreServer()
        try:
            made = Group(Path(folder), postgres.database(), objects.bucket(), dict(objects.environment))
            try:
                yield Path(folder), postgres, made
            finally:
                made.close()
        finally:
            objects.stop()
            postgres.remove()


def main() -> None:
    """Run and print."""
    command = parser(__doc__)
    command.add_argument("--ways", default=USUAL, help=f"how many disturbances of each kind, of {', '.join(WAYS)}")
    command.add_argument("--rounds", type=int, default=25, help="of each federation")
    command.add_argument("--seed", type=int, default=SEED)
    command.add_argument("--many", type=int, default=0, help="so many federations instead, and the death of one holder")
    command.add_argument("--running", type=int, default=100, help="with --many: how many of them are running")
    options = command.parse_args()
    about = machine()
    with group() as (folder, postgres, made):
        if options.many:
            name, figures = "many", kill_one_of_three(made, postgres, options.many, options.running)
        else:
            wanted = {way: int(number) for way, number in (each.split("=") for each in options.ways.split(","))}
            name, figures = (
                f"seed {options.seed}",
                campaign(wanted, options.rounds, METHODS, options.seed, folder, made),
            )
    print(json.dumps(figures, indent=1))
    earlier = json.loads(options.json.read_text()) if options.json is not None and options.json.exists() else {}
    write(options.json, earlier | {name: {"machine": about, **figures}})


if __name__ == "__main__":
    main()
