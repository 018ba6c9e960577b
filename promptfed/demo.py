"""`promptfed demo`: a whole federation on this machine, from nothing to a table of zero-shot against federated."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from promptfed.api import CommandError
from promptfed.exits import Exit
from promptfed.local import LocalFederation, Site
from promptfed.output import console, print_json, size
from promptfed.processes import Processes, ProcessFailed, interrupt_on_sigterm
from promptfed.watching import Result, Row, Watcher, follow, read_result, result_table
from shared.data.demo import DEMOS, Demo


@dataclass(frozen=True)
class DemoResult:
    """What `promptfed demo --json` prints last; splits are named ``client:<name>`` and ``unseen:<domain>``."""

    method: str
    rounds: int
    seconds: float
    zero_shot: dict[str, float]
    federated: dict[str, float]
    bytes_up: int
    bytes_down: int


def run_demo(*, method: str, rounds: int | None, data: str, seed: int, keep: Path | None, as_json: bool) -> None:
    """Run the demo and print its result.

    Raises:
        CommandError: unknown data or method, a federation that does not finish, or a process that dies too often.
    """
    interrupt_on_sigterm()
    started = time.monotonic()
    if data not in DEMOS:
        raise CommandError(f"there is no demo {data!r}: use {' or '.join(sorted(DEMOS))}", Exit.BAD_INPUT)
    spec = demo_spec(DEMOS[data], method, rounds, seed)
    try:
        with _folder(keep) as folder, Processes(folder) as processes:
            result = _run(DEMOS[data], spec, processes, folder, quiet=as_json)
    except ProcessFailed as error:
        raise CommandError(str(error), Exit.FAILED) from None
    if result is None:
        raise CommandError("no client sent an accuracy: look at their logs with --keep FOLDER", Exit.FAILED)
    _show(result, method, time.monotonic() - started, as_json)


def demo_spec(demo: Demo, method: str, rounds: int | None, seed: int) -> dict[str, Any]:
    """The spec that the demo POSTs: the data's training settings, three clients, each asked every round."""
    return {
        "name": f"demo-{method}".replace("_", "-"),
        "method": {"name": method},
        "rounds": rounds or demo.rounds,
        "training": demo.training,
        "template": demo.template,
        "participation": {"min_clients": len(demo.clients)},
        "evaluation": {"every": max(1, (rounds or demo.rounds) // 5)},
        "seed": seed,
    }


def _run(demo: Demo, spec: dict[str, Any], processes: Processes, folder: Path, quiet: bool) -> Result | None:
    referee, unseen = demo.unseen
    sites = [*(Site(name, uri) for name, uri in demo.clients), Site(referee, unseen, role="evaluator")]
    with Watcher(spec["rounds"], quiet=quiet) as watcher:
        watcher.say("starting the coordinator")
        with LocalFederation(processes, folder) as local:
            federation = local.create(spec)
            watcher.say("starting three clients, and an evaluator for the unseen domain")
            local.enrol(federation, sites, lambda count: watcher.say(f"{count} of {len(sites)} have enrolled"))
            local.api.post(f"/v1/federations/{federation}/start")
            for snapshot in follow(local.api, federation, between=lambda: _revive(processes, watcher)):
                watcher.show(snapshot)
            if snapshot.state != "finished":
                text = f"the federation is {snapshot.describe()}: look at the logs with --keep FOLDER"
                raise CommandError(text, Exit.FEDERATION_ENDED_BADLY)
            return read_result(local.api, federation)


def _revive(processes: Processes, watcher: Watcher) -> None:
    for name in processes.watch():
        watcher.say(f"{name} had died and was started again")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="promptfed-demo-") as made:
            yield Path(made)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise CommandError(f"{keep} is not empty: give --keep a new folder", Exit.BAD_INPUT)
    except OSError as error:
        raise CommandError(f"cannot use {keep}: {error.strerror}", Exit.BAD_INPUT) from None
    yield keep


def _show(result: Result, method: str, seconds: float, as_json: bool) -> None:
    if as_json:
        found = DemoResult(
            method=method,
            rounds=result.round,
            seconds=round(seconds, 2),
            zero_shot={_split(row): row.zero_shot for row in result.rows if row.zero_shot is not None},
            federated={_split(row): row.federated for row in result.rows},
            bytes_up=result.bytes_up,
            bytes_down=result.bytes_down,
        )
        print_json(asdict(found))
        return
    console.print(result_table(result, f"Accuracy of {method} after {result.round} rounds"))
    text = (
        f"{seconds:.0f} s in all; the clients sent {size(result.bytes_up)} up and took {size(result.bytes_down)} down"
    )
    console.print(f"{text}, and not one image.", highlight=False, soft_wrap=True)


def _split(row: Row) -> str:
    return f"client:{row.client}" if row.role == "trainer" else f"unseen:{row.domain or row.client}"
