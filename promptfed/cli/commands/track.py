"""`promptfed track`: writes a federation's metrics to experiment trackers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Api, Federation, Json
from promptfed.sdk import trackers
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.follow import Snapshot
from promptfed.sdk.output import tell
from promptfed.sdk.progress import Watcher


@app.add(section="Operate federations")
def track(
    federation: Federation,
    to: Annotated[list[str], typer.Option(help="tensorboard:FOLDER or mlflow:URI, repeatable")],
    api: Api,
    as_json: Json = False,
) -> None:
    """Follow a federation and write every round's metrics to TensorBoard or MLflow, also if it has finished already."""
    written = -1
    with ExitStack() as stack, Watcher(quiet=as_json) as watcher:
        opened = [stack.enter_context(trackers.open_tracker(place)) for place in to]

        def show(snapshot: Snapshot, last: int) -> None:
            nonlocal written
            written = last
            watcher.show(snapshot)

        end = trackers.track(api, federation, opened, show)
    result = {"federation": federation, "state": end.state, "last_round": written, "to": to}
    tell(as_json, result, f"Wrote the rounds up to {written} to {', '.join(to)}.")
    if end.state != "finished":
        raise CommandError(f"the federation is {end.describe()}", Exit.FEDERATION_ENDED_BADLY)
