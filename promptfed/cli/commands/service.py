"""`promptfed service`: a coordinator or a client that systemd starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from promptfed.cli.app import app
from promptfed.runtime import systemd
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import say

group = app.group("service", "Let the system run a coordinator or a client.", section="Operate federations")


@group.add()
def install(
    context: typer.Context,
    service: Annotated[Literal["coordinator", "client"], typer.Argument(help="which of the two")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="after --: the options of the service")
    ] = None,
    name: Annotated[str | None, typer.Option(help="the unit's name; default: promptfed-SERVICE")] = None,
    account: Annotated[str, typer.Option(help="the user that a system's service runs as")] = "promptfed",
    user: Annotated[bool, typer.Option("--user", help="a service of yours; default: of the system, as root")] = False,
    folder: Annotated[Path | None, typer.Option(help="where the unit is written; default: where systemd looks")] = None,
    start: Annotated[bool, typer.Option("--start", help="start it now, and with the machine")] = False,
) -> None:
    """Write a systemd unit that runs the service with these options in this folder. It starts nothing without --start.

    A service asks nobody: a client needs --yes among its options, once you have read what it shows with --check.
    """
    if start and folder is not None:
        raise CommandError("--start needs the unit where systemd looks: leave out --folder", Exit.BAD_INPUT)
    given = list(options or ())
    _check(context, service, given)
    unit = systemd.Unit(service, given, name or f"promptfed-{service}", None if user else account)
    file = unit.write(folder)
    commands = unit.starting()
    if not start:
        say(f"{file} is written. This starts it, now and with the machine:\n  " + "\n  ".join(map(" ".join, commands)))
        return
    for command in commands:
        systemd.run(command)
    say(f"{unit.name} is started.")


def _check(context: typer.Context, service: str, given: list[str]) -> None:
    """Let the service's command read its options, as the unit will; it ends with a usage error if it cannot."""
    root = context.find_root()
    commands: Any = root.command
    commands.get_command(root, service).make_context(f"promptfed {service}", list(given))
