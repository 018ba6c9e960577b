"""`promptfed site-log`: what a client was asked, and what it has shown, agreed to, computed, sent and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.client_service.state import site_log
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import say, tell
from promptfed.shared.plain_text import counted, plain

group = app.group("site-log", "Read and verify a client's own log.", "Take part with own data")

StateDir = Annotated[Path, typer.Argument(help="the client's --state-dir")]


@group.add()
def show(state_dir: StateDir = Path(), as_json: Json = False) -> None:
    """Print the log, one line for each entry."""
    try:
        lines = site_log.read(state_dir)
    except site_log.ChangedLog as changed:
        raise CommandError(f"the site log was changed: {changed}", Exit.REFUSED) from None
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line))
            continue
        facts = [f"{key}={value}" for key, value in line.items() if key not in ("n", "at", "what", "chain", "text")]
        say(" ".join([str(line["at"])[:19], str(line["what"]), *map(plain, facts)]))


@group.add()
def verify(
    state_dir: StateDir = Path(),
    head: Annotated[str | None, typer.Option(help="a head that an earlier verify has printed")] = None,
    as_json: Json = False,
) -> None:
    """Compute the log's chain of hashes again; the exit code is 6 if the log was changed."""
    try:
        last = site_log.verify(state_dir, head)
    except site_log.ChangedLog as changed:
        raise CommandError(f"the site log was changed: {changed}", Exit.REFUSED) from None
    text = f"{counted(last.n, 'line')}, each as it was written; head {last.chain}"
    tell(as_json, {"lines": last.n, "head": last.chain}, text)
