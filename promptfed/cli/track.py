"""`promptfed track`: a federation's metrics, followed at its coordinator and written to experiment trackers."""

from __future__ import annotations

from contextlib import ExitStack

from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.follow import Snapshot
from promptfed.sdk.output import console, print_json
from promptfed.sdk.progress import Watcher
from promptfed.sdk.trackers import open_tracker, track


def run_track(api: Coordinator, federation: str, where: list[str], as_json: bool) -> None:
    """Follow ``federation`` to its end and write every round to all trackers.

    Raises:
        CommandError: no such tracker or federation, or the federation ended otherwise than finished.
    """
    written = -1
    with ExitStack() as stack, Watcher(quiet=as_json) as watcher:
        trackers = [stack.enter_context(open_tracker(place)) for place in where]

        def show(snapshot: Snapshot, last: int) -> None:
            nonlocal written
            written = last
            watcher.show(snapshot)

        end = track(api, federation, trackers, show)
    if as_json:
        print_json({"federation": federation, "state": end.state, "last_round": written, "to": where})
    else:
        console.print(f"Wrote the rounds up to {written} to {', '.join(where)}.", highlight=False, soft_wrap=True)
    if end.state != "finished":
        raise CommandError(f"the federation is {end.describe()}", Exit.FEDERATION_ENDED_BADLY)
