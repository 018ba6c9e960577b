"""`promptfed site-log`: a client's own log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.client_service.state import site_log
from promptfed.console.output import say, tell
from promptfed.shared.errors import BadInput, Refused
from promptfed.shared.plain_text import counted, plain

site_log_group = app.group("site-log", "Read and verify a client's own log.", "Take part with own data")
StateDir = Annotated[Path, typer.Argument(help="the client's --state-dir")]


def _expect_log(folder: Path) -> None:
    """Raise PromptfedError if a folder has neither a log nor the head of one."""
    if not any((folder / name).exists() for name in (site_log.FILE, site_log.HEAD)):
        text = f"{folder} holds no {site_log.FILE}: name the --state-dir of a client that has joined"
        raise BadInput(text)


@site_log_group.add("show")
def show_log(state_dir: StateDir = Path(), as_json: Json = False) -> None:
    """Print the log, one line for each entry."""
    _expect_log(state_dir)
    try:
        lines = site_log.read(state_dir)
    except site_log.ChangedLog as changed:
        raise Refused(f"the site log was changed: {changed}") from None
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line))
            continue
        facts = [f"{key}={value}" for key, value in line.items() if key not in ("n", "at", "what", "chain", "text")]
        say(" ".join([str(line["at"])[:19], str(line["what"]), *map(plain, facts)]))


@site_log_group.add("verify")
def verify_log(
    state_dir: StateDir = Path(),
    head: Annotated[str | None, typer.Option(help="a head that an earlier verify has printed")] = None,
    as_json: Json = False,
) -> None:
    """Compute the log's chain of hashes again; the exit code is 6 if the log was changed."""
    _expect_log(state_dir)
    try:
        last = site_log.verify(state_dir, head)
    except site_log.ChangedLog as changed:
        raise Refused(f"the site log was changed: {changed}") from None
    text = f"{counted(last.n, 'line')}, each as it was written; head {last.chain}"
    tell(as_json, {"lines": last.n, "head": last.chain}, text)
